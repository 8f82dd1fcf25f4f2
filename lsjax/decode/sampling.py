"""How a token is chosen from logits, and how many drafts are accepted."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def greedy(logits: jax.Array) -> jax.Array:
    """float32 ``[..., vocab]`` to int32 ``[...]``: the most probable token, the lowest id among equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def accept_greedy(drafts: jax.Array, targets: jax.Array, counts: jax.Array) -> jax.Array:
    """How many drafts the full model would have written itself: the longest matching prefix.

    Args:
        drafts: int32 ``[batch, K]``.
        targets: int32 ``[batch, K + 1]``, the full model's own choice at each of these positions and after the last.
        counts: int32 ``[batch]``, how many of the drafts each row may use.

    Returns:
        int32 ``[batch]``, 0..counts.
    """
    width = drafts.shape[1]
    matches = (drafts == targets[:, :width]) & (jnp.arange(width) < counts[:, None])
    return jnp.cumprod(matches.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)
