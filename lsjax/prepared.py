"""What only decoding wants: a model's weights in the form that a step reads fastest."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from lsjax.checks import check_params, is_traced
from lsjax.config import LlamaConfig
from lsjax.model.llama import Llama
from lsjax.params import Model, Params


@jax.tree_util.register_pytree_with_keys_class
class DecodeParams(Model):
    """A model's weights prepared for decoding; :func:`prepare` makes it, and everything that decodes takes it.

    The same numbers as ``Params`` in fewer arrays: one product for queries, keys and values, one for the MLP's gate and
    up projections, and on CPUs the head as ``[hidden, vocab]`` also where it is tied to the embedding.
    """

    @property
    def module(self) -> Llama:
        """The Flax module that reads these arrays."""
        tied = "lm_head" not in self.tree
        return Llama(dataclasses.replace(self.config, tie_word_embeddings=tied), fused=True)

    def __repr__(self) -> str:
        return f"DecodeParams({self.config!r})"


def prepare(params: Params | DecodeParams, *, donate: bool = False) -> DecodeParams:
    """Puts a model's weights into the form that decoding reads fastest: once, before many calls of ``generate``.

    The text stays the same, up to ties of rounding. Arrays that need no other form are shared with ``params``, whose
    sharding the new ones follow.

    Args:
        params: the model; one that is prepared comes back as it is.
        donate: deletes each array of ``params`` that is replaced as soon as its replacement is made, so that no more
            than one layer's weights exist twice. ``params`` cannot be used after.

    Example:
        >>> prepared = lsjax.prepare(params)
        >>> out = lsjax.generate(prepared, tokens, exit_layer=4)
    """
    check_params(params)
    if isinstance(params, DecodeParams):
        return params
    config = params.config
    tree: dict[str, Any] = {}
    for name, module in params.tree.items():
        tree[name] = _prepare_layer(module, config, donate) if name.startswith("layers_") else module
    if "lm_head" not in tree and _platform(tree["embed_tokens"]["embedding"]) == "cpu":
        # XLA's CPU products read a matrix along its rows: 0.8 of the time at five positions, as measured.
        tree["lm_head"] = {"kernel": _transpose(tree["embed_tokens"]["embedding"])}
    return DecodeParams.tree_unflatten(config, (tree,))


def _prepare_layer(layer: dict[str, Any], config: LlamaConfig, donate: bool) -> dict[str, Any]:
    attention, mlp = dict(layer["self_attn"]), dict(layer["mlp"])
    queries, keys, values = (attention.pop(name) for name in ("q_proj", "k_proj", "v_proj"))
    gate, up = mlp.pop("gate_proj"), mlp.pop("up_proj")
    attention["qkv_proj"] = {
        kind: _join_heads(queries[kind], keys[kind], values[kind], config.num_key_value_heads) for kind in queries
    }
    mlp["gate_up_proj"] = {kind: _join_columns(gate[kind], up[kind]) for kind in gate}
    if donate:
        jax.block_until_ready((attention, mlp))
        for leaf in jax.tree.leaves((queries, keys, values, gate, up)):
            leaf.delete()
    return {**layer, "self_attn": attention, "mlp": mlp}


# One small program each, whatever the number of layers.
@jax.jit
def _transpose(kernel: jax.Array) -> jax.Array:
    return kernel.T


@jax.jit
def _join_columns(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``[..., columns]`` each, to ``[..., 2, columns]``."""
    return jnp.stack([gate, up], axis=-2)


@functools.partial(jax.jit, static_argnums=3)
def _join_heads(queries: jax.Array, keys: jax.Array, values: jax.Array, kv_heads: int) -> jax.Array:
    """``[..., heads · head_dim]`` each, to ``[..., kv_heads, group + 2, head_dim]``."""
    parts = [x.reshape(*x.shape[:-1], kv_heads, -1, keys.shape[-1] // kv_heads) for x in (queries, keys, values)]
    return jnp.concatenate(parts, axis=-2)


def _platform(array: Any) -> str:
    """Where an array lies: ``"cpu"``, ``"gpu"`` or ``"tpu"``; inside a ``jit``, where it will most likely run."""
    if is_traced(array) or not isinstance(array, jax.Array):
        return jax.default_backend()
    return next(iter(array.devices())).platform
