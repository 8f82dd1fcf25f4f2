"""Causal grouped-query attention in blocks of keys, so that its cost follows the used length, not the capacity."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from lsjax.model.blocks import join_positions, split_positions
from lsjax.model.cache import LayerCache, read
from lsjax.model.projection import on_cpu

BLOCK = 256  # keys (and, in long prompts, queries) taken at a time, at most
_LEAST_BLOCK = 32
_LEAST_SPAN, _MOST_SPANS = 64, 8  # queries that read no further than their last, in training; and how many such spans
_CACHED_BYTES = 512 * 1024  # of keys in one block: what stays in a CPU core's own cache between its two readings


def attend(query: jax.Array, cache: LayerCache, positions: jax.Array, used: jax.Array | int) -> jax.Array:
    """Softmax attention over the keys at or before each query's position.

    The softmax is accumulated block by block in float32 (online softmax, arXiv 1805.02867); blocks at or past ``used``
    are never read. Heads that share a key head are rows of one matrix product; keys are not repeated.

    Args:
        query: ``[batch, length, heads, head_dim]``, rotated.
        cache: keys, rotated, and values; slot j holds position j.
        positions: int32 ``[batch or 1, length]``, the queries' positions, rising along ``length``.
        used: slots that may be read, a bound for all rows. An int makes the loop's length static, and so the whole
            differentiable in reverse mode.

    Returns:
        ``[batch, length, heads * head_dim]`` in the query's dtype.
    """
    length = query.shape[1]
    if length <= BLOCK:
        return _attend(query, cache, positions, used)

    # Long prompts: queries in blocks too, each reading no further than its own last position.
    def one(block):
        queries, where = block
        return _attend(queries, cache, where, used if isinstance(used, int) else jnp.max(where) + 1)

    return join_positions(
        lax.map(one, (split_positions(query, BLOCK), split_positions(positions, BLOCK, mode="edge"))), length
    )


def attend_documents(query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array) -> jax.Array:
    """Softmax attention over the earlier positions of the same document, for training: rows of packed documents.

    Queries are taken in a few spans that read only the keys up to their own end, and in long rows these in blocks, all
    of which reverse mode computes anew, so that memory grows with the length, not its square.

    Args:
        query: ``[batch, length, heads, head_dim]``, rotated.
        key: ``[batch, kv_heads, length, head_dim]``, rotated.
        value: likewise.
        documents: int ``[batch, length]``, which document each position belongs to, a number of its own in its row.

    Returns:
        ``[batch, length, heads * head_dim]`` in the query's dtype.
    """
    length = query.shape[1]
    if length <= BLOCK:
        span = -(-length // max(1, min(_MOST_SPANS, length // _LEAST_SPAN)))
    else:  # two blocks at least: a loop of one is none, and XLA's CPU backend keeps what is to be computed anew
        span = 2 * BLOCK * -(-length // (2 * BLOCK * _MOST_SPANS))
    mixed = []
    for first in range(0, length, span):
        end = min(first + span, length)
        mixed.append(_attend_span(first, query[:, first:end], key[:, :, :end], value[:, :, :end], documents[:, :end]))
    return jnp.concatenate(mixed, axis=1)


def _attend_span(first: int, query: jax.Array, key: jax.Array, value: jax.Array, documents: jax.Array) -> jax.Array:
    """The same for queries from position ``first`` to the last key's."""
    batch, length, heads, head_dim = query.shape
    kv_heads, slots = key.shape[1:3]
    group, block, order = heads // kv_heads, min(BLOCK, length), jnp.arange(slots)

    def one(queries: jax.Array, own: jax.Array, begin: jax.Array | int) -> jax.Array:
        grouped = queries.reshape(batch, block, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
        grouped = grouped.reshape(batch, kv_heads, block * group, head_dim)
        scores = _batched_dot(grouped, key, contract=(3, 3)) * head_dim**-0.5
        earlier = order <= begin + jnp.arange(block)[:, None]
        visible = earlier & (own[:, :, None] == documents[:, None, :])  # itself always
        scores = jnp.where(jnp.repeat(visible, group, axis=1)[:, None], scores, -jnp.inf)
        mixed = _batched_dot(jax.nn.softmax(scores).astype(value.dtype), value, contract=(3, 2)).astype(query.dtype)
        mixed = mixed.reshape(batch, kv_heads, block, group, head_dim).transpose(0, 2, 1, 3, 4)
        return mixed.reshape(batch, block, heads * head_dim)

    own = documents[:, first:]
    if block == length:
        return one(query, own, first)
    queries, own = split_positions(query, block), split_positions(own, block, mode="edge")
    blocks = queries, own, first + jnp.arange(0, len(own) * block, block)
    return join_positions(lax.map(jax.checkpoint(lambda given: one(*given), prevent_cse=False), blocks), length)


def block_size(batch: int, kv_heads: int, slots: int, head_dim: int, length: int) -> int:
    """How many keys to take at a time.

    On CPUs few positions read blocks that fit a core's cache (a step of 16 rows is four times as fast with blocks of
    32 as with 256), and never all slots at once: XLA would copy a cache that is used whole in the loop that writes it.
    """
    block = min(BLOCK, slots)
    if on_cpu() and length <= _LEAST_BLOCK:
        row_bytes = 4 * batch * kv_heads * head_dim
        while block > _LEAST_BLOCK and (block == slots or block * row_bytes > _CACHED_BYTES):
            block = max(_LEAST_BLOCK, 1 << (block - 1).bit_length() - 1)
    return block


def _attend(query: jax.Array, cache: LayerCache, positions: jax.Array, used: jax.Array | int):
    batch, length, heads, head_dim = query.shape
    kv_heads, slots = cache.key.shape[1:3]
    group = heads // kv_heads
    block = block_size(batch, kv_heads, slots, head_dim, length)
    rows = length * group  # the queries that meet one key head
    dtype = query.dtype
    query = query.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    query = query.reshape(batch, kv_heads, rows, head_dim)
    row_position = jnp.repeat(positions, group, axis=1)[:, None, :, None]  # [batch or 1, 1, rows, 1]

    def step(index, carry):
        maximum, total, mixed = carry
        first = jnp.minimum(index * block, slots - block)  # the last block may overlap the one before it
        # Batch and key heads stay two axes: with heads on several devices, merging them would gather the cache.
        keys, values = (read(held, first, block, cache.dtype) for held in (cache.key, cache.value))
        scores = (
            _batched_dot(query.astype(jnp.promote_types(dtype, keys.dtype)), keys, contract=(3, 3)) * head_dim**-0.5
        )
        slot = first + jnp.arange(block)
        visible = (slot <= row_position) & (slot >= index * block)
        scores = jnp.where(visible, scores, -jnp.inf)
        # Slot 0 is visible to every query, so the maximum is finite from the first block on.
        new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
        weights = jnp.exp(scores - new_maximum[..., None])
        rescale = jnp.exp(maximum - new_maximum)
        total = total * rescale + weights.sum(axis=-1)
        mixed = mixed * rescale[..., None] + _batched_dot(weights.astype(values.dtype), values, contract=(3, 2))
        return new_maximum, total, mixed

    carry = (
        jnp.full((batch, kv_heads, rows), -jnp.inf, jnp.float32),
        jnp.zeros((batch, kv_heads, rows), jnp.float32),
        jnp.zeros((batch, kv_heads, rows, head_dim), jnp.float32),
    )
    blocks = -(-used // block)
    _, total, mixed = step(0, carry) if slots == block else lax.fori_loop(0, blocks, step, carry)
    out = (mixed / total[..., None]).astype(dtype)
    out = out.reshape(batch, kv_heads, length, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, length, heads * head_dim)


def _batched_dot(left: jax.Array, right: jax.Array, contract: tuple[int, int]) -> jax.Array:
    dimensions = (((contract[0],), (contract[1],)), ((0, 1), (0, 1)))
    return lax.dot_general(left, right, dimensions, preferred_element_type=jnp.float32)
