"""Each module of ours on what torch gave its own, so that errors do not add up and a fault shows where it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lsjax.measure.reference import LAYER_PARTS, Reference, Seen
from lsjax.measure.report import ParityRow, compare, worse
from lsjax.model.llama import Block, Llama
from lsjax.model.rope import rotation
from lsjax.params import Params


def _attention(block: Any, hidden: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return block.self_attn(hidden, jnp.arange(hidden.shape[1])[None], (cos, sin))[0]


def _layer(block: Any, hidden: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    return block(hidden, jnp.arange(hidden.shape[1])[None], (cos, sin))[0]


# By transformers' names; a part of a layer is called on the layer's module, any other on the whole model.
_CALLS: dict[str, Callable[..., jax.Array]] = {
    "embed_tokens": lambda model, tokens: model.embed(tokens),
    "input_layernorm": lambda block, hidden: block.input_layernorm(hidden),
    "self_attn.q_proj": lambda block, hidden: block.self_attn.q_proj(hidden),
    "self_attn.k_proj": lambda block, hidden: block.self_attn.k_proj(hidden),
    "self_attn.v_proj": lambda block, hidden: block.self_attn.v_proj(hidden),
    "self_attn.o_proj": lambda block, hidden: block.self_attn.o_proj(hidden),
    "self_attn": _attention,
    "post_attention_layernorm": lambda block, hidden: block.post_attention_layernorm(hidden),
    "mlp.gate_proj": lambda block, hidden: block.mlp.gate_proj(hidden),
    "mlp.up_proj": lambda block, hidden: block.mlp.up_proj(hidden),
    "mlp.down_proj": lambda block, hidden: block.mlp.down_proj(hidden),
    "mlp": lambda block, hidden: block.mlp(hidden),
    "": _layer,
    "norm": lambda model, hidden: model.norm(hidden),
    "lm_head": lambda model, hidden: model.head(hidden),
}
_NAMES = {"": "whole layer"}
_ORDER = ("embed_tokens", "rotary cos", "rotary sin", *LAYER_PARTS, "norm", "lm_head")


def compare_modules(
    params: Params, reference: Reference, tokens: np.ndarray, valid: np.ndarray, tolerance: float
) -> list[ParityRow]:
    """One row for each kind of module: the largest relative error over the layers, and the layer that has it.

    Args:
        params: the model, in float32.
        reference: the model to compare with.
        tokens: int ``[batch, length]``, padded on the right.
        valid: bool ``[batch, length]``, the positions to compare.
        tolerance: of the relative error; see :class:`~lsjax.measure.report.ParityRow`.
    """
    rows: dict[str, ParityRow] = {}

    def note(part: str, layer: int | None, found: Any, expected: np.ndarray) -> None:
        where = None if layer is None else f"layers.{layer}"
        places = None if part.startswith("rotary") else valid  # the angles are the same for all rows
        row = compare(_NAMES.get(part, part), found, expected, tolerance, where, places)
        rows[part] = worse(rows[part], row) if part in rows else row

    def see(seen: Seen) -> None:
        if seen.part == "rotary_emb":
            ours = rotation(params.config, jnp.asarray(seen.given), seen.given.shape[-1])
            for name, angles, expected in zip(("rotary cos", "rotary sin"), ours, seen.output, strict=True):
                note(name, None, np.tile(angles, 2), expected)  # transformers keeps both halves of a head
            return
        note(seen.part, seen.layer, _run(params, seen), *seen.output)

    reference.observe(tokens, see)
    return [rows[part] for part in _ORDER]


def _run(params: Params, seen: Seen) -> np.ndarray:
    """Our module's output for what torch's was given, rotary angles included."""
    if seen.layer is None:
        given = seen.given.astype(np.int32) if seen.part == "embed_tokens" else seen.given
        return np.asarray(_apply(Llama(params.config), seen.part, params.tree, given))
    angles = [angle[..., : params.config.head_dim // 2] for angle in seen.angles or ()]
    layer = params.tree[f"layers_{seen.layer}"]
    return np.asarray(_apply(Block(params.config), seen.part, layer, seen.given, *angles))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(module: nn.Module, part: str, tree: Any, *given: jax.Array) -> Any:
    """One program for each part, shared by the layers."""
    return module.apply({"params": tree}, *given, method=_CALLS[part])
