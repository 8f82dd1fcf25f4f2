"""Where a row ends: at the earliest end-of-sequence token, kept once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

NO_TOKEN = -1  # fills up the list of EOS ids; no model writes it


def eos_array(ids: tuple[int, ...]) -> np.ndarray:
    """EOS ids as int32 ``[4, 8, 16, …]``, so that runs with other ids share a compiled program."""
    count = 4
    while count < len(ids):
        count *= 2
    return np.array(ids + (NO_TOKEN,) * (count - len(ids)), np.int32)


def first_eos(tokens: jax.Array, valid: jax.Array, eos: jax.Array) -> jax.Array:
    """int32 ``[batch]``: the first valid position with an EOS, else ``length``.

    Args:
        tokens: int32 ``[batch, length]``.
        valid: bool ``[batch, length]``.
        eos: int32 ``[batch, count]``.
    """
    ends = valid & (tokens[:, :, None] == eos[:, None, :]).any(axis=-1)
    return jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1), tokens.shape[1]).astype(jnp.int32)
