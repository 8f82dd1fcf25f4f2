"""What only decoding wants: a model's weights in the form that a step reads fastest."""

from __future__ import annotations

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
    up projections; and on CPUs transposed, ``[out, in]``.
    """

    @property
    def module(self) -> Llama:
        """The Flax module that reads these arrays."""
        return Llama(self.config, fused=True, transposed="weight" in self.tree["layers_0"]["mlp"]["down_proj"])

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

    Raises:
        ValueError: ``donate`` inside a ``jit``.

    Example:
        >>> prepared = lsjax.prepare(params)
        >>> out = lsjax.generate(prepared, tokens, exit_layer=4)
    """
    check_params(params)
    if isinstance(params, DecodeParams):
        return params
    if donate and is_traced(params):
        raise ValueError("donate: expected False inside jit, where XLA decides what lives on, got True")
    # CPUs read [out, in] as fast for one position, and up to twice as fast for the several that a check reads.
    transposed = _platform(params.tree["embed_tokens"]["embedding"]) == "cpu"
    tree: dict[str, Any] = {}
    for name, module in params.tree.items():
        if name.startswith("layers_"):
            module = _prepare_layer(module, params.config, transposed, donate)
        elif name == "lm_head" and transposed:
            module = _replace(module, _transposed(module), donate)
        tree[name] = module
    return DecodeParams.tree_unflatten(params.config, (tree,))


def _prepare_layer(layer: dict[str, Any], config: LlamaConfig, transposed: bool, donate: bool) -> dict[str, Any]:
    attention, mlp = layer["self_attn"], layer["mlp"]
    queries, keys, values, out = (attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    gate, up, down = (mlp[name] for name in ("gate_proj", "up_proj", "down_proj"))
    joined = {
        kind: _join_heads(queries[kind], keys[kind], values[kind], config.num_key_value_heads) for kind in queries
    }
    columns = {kind: _join_columns(gate[kind], up[kind]) for kind in gate}
    attention = {"qkv_proj": joined, "o_proj": out}
    mlp = {"gate_up_proj": columns, "down_proj": down}
    if transposed:
        attention, mlp = ({name: _transposed(module) for name, module in part.items()} for part in (attention, mlp))
    layer, old = {**layer, "self_attn": attention, "mlp": mlp}, layer
    return _replace(old, layer, donate)


def _replace(old: dict[str, Any], new: dict[str, Any], donate: bool) -> dict[str, Any]:
    """The new arrays, made; the old ones that are not among them deleted if they are donated."""
    if donate:
        kept = {id(leaf) for leaf in jax.tree.leaves(jax.block_until_ready(new))}
        for leaf in jax.tree.leaves(old):
            if id(leaf) not in kept:
                leaf.delete()
    return new


def _transposed(module: dict[str, Any]) -> dict[str, Any]:
    """``kernel`` ``[in, ...]`` to ``weight`` ``[..., in]``; a bias stays."""
    return {"weight": _move_first_last(module["kernel"])} | {k: v for k, v in module.items() if k != "kernel"}


# One small program each, whatever the number of layers.
@jax.jit
def _move_first_last(kernel: jax.Array) -> jax.Array:
    return jnp.moveaxis(kernel, 0, -1)


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
