"""Rows of a batch: ``jax.vmap`` folds its mapped axis into them, and blocks are written into each at its own place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

Rows = TypeVar("Rows")


class Shared(flax.struct.PyTreeNode):
    """A part of a pytree of rows that all rows have in common: its arrays have no batch axis.

    Attributes:
        value: any pytree.
    """

    value: Any


def fold_rows(function: Callable[[Any, Any], Rows]) -> Callable[[Any, Any], Rows]:
    """A function of rows that ``vmap`` calls once, on all mapped rows together.

    A ``while`` loop under ``vmap`` runs until the last mapped one ends, and selects every carried array, whole caches
    among them, at every step. Rows are independent of each other, so ``[n, batch, …]`` is folded to ``[n·batch, …]``
    instead and costs what a batch of that size costs. Mapped parameters are taken one after the other (``lax.map``),
    and so is what the rows share.

    Args:
        function: ``(params, rows) -> rows``, where every array of both pytrees of rows starts with the batch axis but
            for those in :class:`Shared`, which go out as they came in, in the same order, or not at all.
    """

    def call(params: Any, rows: Any) -> Any:
        rows, shared = take_shared(rows)

        @custom_vmap
        def folded(fixed: Any, rows: Any) -> Any:
            params, shared = fixed
            return take_shared(function(params, put_shared(rows, shared)))[0]

        @folded.def_vmap
        def rule(axis_size: int, in_batched: list[Any], fixed: Any, rows: Any) -> tuple[Any, Any]:
            fixed_batched, rows_batched = in_batched
            if any(jax.tree.leaves(fixed_batched)):
                found = _one_by_one(folded, (fixed, rows), (fixed_batched, rows_batched))
            else:
                found = folded(fixed, jax.tree.map(lambda x, batched: _fold(x, batched, axis_size), rows, rows_batched))
                found = jax.tree.map(lambda x: x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]), found)
            return found, jax.tree.map(lambda _: True, found)

        return put_shared(folded((params, shared), rows), shared)

    return call


def write_rows(rows: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    """``[batch, slots, ...]`` with a block ``[batch, length, ...]`` in each row from its own position on.

    Args:
        rows: where to write.
        block: what to write.
        start: int32 ``[batch]``.
    """

    def write(row: jax.Array, values: jax.Array, first: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(row, values, (first, *[jnp.int32(0)] * (row.ndim - 1)))

    return jax.vmap(write)(rows, block, start)


def take_shared(tree: Any) -> tuple[Any, list[Any]]:
    """A pytree without the values of its :class:`Shared` parts, and these."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_shared)
    values = [leaf.value for leaf in leaves if _is_shared(leaf)]
    return structure.unflatten([Shared(None) if _is_shared(leaf) else leaf for leaf in leaves]), values


def put_shared(tree: Any, values: list[Any]) -> Any:
    """The inverse of :func:`take_shared`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_shared)
    rest = iter(values)
    return structure.unflatten([Shared(next(rest)) if _is_shared(leaf) else leaf for leaf in leaves])


def _is_shared(x: Any) -> bool:
    return isinstance(x, Shared)


def _fold(x: jax.Array, batched: bool, axis_size: int) -> jax.Array:
    x = x if batched else jnp.broadcast_to(x, (axis_size, *x.shape))
    return x.reshape(axis_size * x.shape[1], *x.shape[2:])


def _one_by_one(function: Callable[..., Any], arguments: Any, batched: Any) -> Any:
    leaves, structure = jax.tree.flatten(arguments)
    flags = jax.tree.leaves(batched)

    def one(mapped: list[jax.Array]) -> Any:
        rest = iter(mapped)
        return function(*structure.unflatten(next(rest) if flag else x for x, flag in zip(leaves, flags, strict=True)))

    return lax.map(one, [x for x, flag in zip(leaves, flags, strict=True) if flag])
