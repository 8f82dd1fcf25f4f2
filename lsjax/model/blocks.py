"""Positions taken some at a time, to bound what exists at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def split_positions(x: jax.Array, size: int, **padding: Any) -> jax.Array:
    """``[batch, length, ...]`` to ``[blocks, batch, size, ...]``, filled up as ``jnp.pad`` does by these options.

    The batch stays an axis, along which rows may be split between devices.
    """
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % size)] + [(0, 0)] * (x.ndim - 2), **padding)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)


def join_positions(x: jax.Array, length: int) -> jax.Array:
    """The inverse of :func:`split_positions`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])[:, :length]
