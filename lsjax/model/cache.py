"""The key/value cache of fixed capacity: one K and one V per layer, written in place.

A cache has no length of its own. Whoever holds it keeps one, and rewinds by moving it: slots at or past the length
hold garbage that the attention mask hides and the next write covers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lsjax.config import LlamaConfig


class LayerCache(NamedTuple):
    """Keys (already rotated) and values of one layer, each ``[batch, kv_heads, slots, head_dim]``."""

    key: jax.Array
    value: jax.Array


def init_cache(config: LlamaConfig, batch: int, slots: int, num_layers: int, dtype) -> tuple[LayerCache, ...]:
    """Empty caches for the first ``num_layers`` layers."""
    shape = (batch, config.num_key_value_heads, slots, config.head_dim)
    return tuple(LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers))


def write(cache: LayerCache, key: jax.Array, value: jax.Array, where: jax.Array | int) -> LayerCache:
    """Puts new keys and values into their slots.

    Args:
        cache: the layer's cache.
        key: ``[batch, kv_heads, length, head_dim]``.
        value: likewise.
        where: the first slot, a scalar for all rows or ``[batch]``, so that ``where + length <= slots``
            (``dynamic_update_slice`` would move a later start back and overwrite the past); or every position's
            slot, ``[batch, length]``, of which those at or past ``slots`` are left out.
    """
    return LayerCache(_write(cache.key, key, where), _write(cache.value, value, where))


def _write(old: jax.Array, new: jax.Array, where: jax.Array | int) -> jax.Array:
    new, where, zero = new.astype(old.dtype), jnp.asarray(where, jnp.int32), jnp.int32(0)  # alike also under x64
    if where.ndim == 1 and new.shape[0] == 1:
        where = where[0]
    match where.ndim:
        case 0:
            return lax.dynamic_update_slice(old, new, (zero, zero, where, zero))
        case 1:
            return jax.vmap(lambda row, block, start: lax.dynamic_update_slice(row, block, (zero, start, zero)))(
                old, new, where
            )
        case _:
            return jax.vmap(lambda row, block, slots: row.at[:, slots].set(block, mode="drop"))(old, new, where)
