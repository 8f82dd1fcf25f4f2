"""The key/value cache of fixed capacity: one K and one V per layer, written in place.

A cache has no length of its own. Whoever holds it keeps one, and rewinds by moving it: slots at or past the length
hold garbage that the attention mask hides and the next write covers.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from lsjax.config import LlamaConfig
from lsjax.model.projection import on_cpu


class LayerCache(flax.struct.PyTreeNode):
    """Keys (already rotated) and values of one layer.

    Attributes:
        key: ``[batch, kv_heads, slots, head_dim]``. On CPUs float16 and bfloat16 lie here as their bits, in uint16:
            XLA has no scatter of theirs there, and would convert the whole cache to float32 and back at every write.
        value: likewise.
        dtype: static; what the numbers are.
    """

    key: jax.Array
    value: jax.Array
    dtype: Any = flax.struct.field(pytree_node=False)

    @property
    def slots(self) -> int:
        """Positions that a row can hold."""
        return self.key.shape[2]


def init_cache(config: LlamaConfig, batch: int, slots: int, num_layers: int, dtype) -> tuple[LayerCache, ...]:
    """Empty caches for the first ``num_layers`` layers."""
    dtype = jnp.dtype(dtype)
    held = jnp.uint16 if dtype.itemsize == 2 and on_cpu() else dtype
    shape = (batch, config.num_key_value_heads, slots, config.head_dim)
    return tuple(LayerCache(jnp.zeros(shape, held), jnp.zeros(shape, held), dtype) for _ in range(num_layers))


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
    key, value = key.astype(cache.dtype), value.astype(cache.dtype)
    return cache.replace(key=_write(cache.key, key, where), value=_write(cache.value, value, where))


def read(held: jax.Array, first: jax.Array | int, count: int, dtype: Any) -> jax.Array:
    """Some slots of a cache's keys or values: ``[batch, kv_heads, count, head_dim]``.

    Args:
        held: ``cache.key`` or ``cache.value``.
        first: the first slot.
        count: static; how many.
        dtype: ``cache.dtype``. Bits come back as float32, which is what CPUs multiply.
    """
    block = lax.dynamic_slice_in_dim(held, first, count, axis=2)
    return block if block.dtype == dtype else lax.bitcast_convert_type(block, dtype).astype(jnp.float32)


def _write(old: jax.Array, new: jax.Array, where: jax.Array | int) -> jax.Array:
    if old.dtype != new.dtype:
        new = lax.bitcast_convert_type(new, old.dtype)
    where, zero = jnp.asarray(where, jnp.int32), jnp.int32(0)  # alike also under x64
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
