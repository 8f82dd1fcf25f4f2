"""``jax.vmap`` over rows: the mapped axis becomes part of the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

Rows = TypeVar("Rows")


def fold_rows(function: Callable[[Any, Any], Rows]) -> Callable[[Any, Any], Rows]:
    """A function of rows that ``vmap`` calls once, on all mapped rows together.

    A ``while`` loop under ``vmap`` runs until the last mapped one ends, and selects every carried array, whole caches
    among them, at every step. Rows are independent of each other, so ``[n, batch, …]`` is folded to ``[n·batch, …]``
    instead and costs what a batch of that size costs. Mapped parameters are taken one after the other (``lax.map``).

    Args:
        function: ``(params, rows) -> rows``, where every array of both pytrees of rows starts with the batch axis.
    """

    @custom_vmap
    def folded(params: Any, rows: Any) -> Any:
        return function(params, rows)

    @folded.def_vmap
    def rule(axis_size: int, in_batched: list[Any], params: Any, rows: Any) -> tuple[Any, Any]:
        params_batched, rows_batched = in_batched
        if any(jax.tree.leaves(params_batched)):
            found = _one_by_one(folded, (params, rows), (params_batched, rows_batched))
        else:
            found = folded(params, jax.tree.map(lambda x, batched: _fold(x, batched, axis_size), rows, rows_batched))
            found = jax.tree.map(lambda x: x.reshape(axis_size, x.shape[0] // axis_size, *x.shape[1:]), found)
        return found, jax.tree.map(lambda _: True, found)

    return folded


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
