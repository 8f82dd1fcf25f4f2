"""Where a row ends: at the earliest end-of-sequence token or the end of the earliest stop sequence, kept once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsjax.checks import as_array, is_traced

NO_TOKEN = -1  # fills up lists of ids; no model writes it
_LEAST_STOPS = 4  # the smallest bucket of the number of stop sequences, and of their length


def eos_array(ids: tuple[int, ...]) -> np.ndarray:
    """EOS ids as int32 ``[4, 8, 16, …]``, so that runs with other ids share a compiled program."""
    return np.array(ids + (NO_TOKEN,) * (_double(len(ids)) - len(ids)), np.int32)


def first_end(valid: jax.Array, ends: jax.Array) -> jax.Array:
    """int32 ``[batch]``: the first valid position that ends a row, else ``length``.

    Args:
        valid: bool ``[batch, length]``.
        ends: bool ``[batch, length]``.
    """
    ends = valid & ends
    return jnp.where(ends.any(axis=1), jnp.argmax(ends, axis=1), ends.shape[1]).astype(jnp.int32)


def at_eos(tokens: jax.Array, eos: jax.Array) -> jax.Array:
    """bool ``[batch, length]``: which tokens ``[batch, length]`` are among their row's EOS ids ``[batch, n]``."""
    return (tokens[:, :, None] == eos[:, None, :]).any(axis=-1)


def at_stop(text: jax.Array, block: jax.Array, begins: jax.Array, lengths: jax.Array, stops: jax.Array) -> jax.Array:
    """Which tokens of a new block end a stop sequence, that may have begun in earlier blocks but not in the prompt.

    Args:
        text: int32 ``[batch, slots]``, what was committed before the block.
        block: int32 ``[batch, length]``, the tokens that follow.
        begins: int32 ``[batch]``, the position of each row's first new token.
        lengths: int32 ``[batch]``, tokens that were committed: the position of the block's first.
        stops: int32 ``[batch, count, width]``, filled up in front with -1, as of :func:`stop_array`.

    Returns:
        bool ``[batch, length]``.
    """
    length, width = block.shape[1], stops.shape[2]
    before = lengths[:, None] + np.arange(1 - width, 0)
    before = jnp.where(before >= begins[:, None], jnp.take_along_axis(text, jnp.maximum(before, 0), axis=1), NO_TOKEN)
    # The sequence of ``width`` tokens that ends at each of the block's: int32 [batch, length, 1, width].
    window = jnp.concatenate([before, block], axis=1)
    window = window[:, np.arange(length)[:, None] + np.arange(width)][:, :, None]
    wanted = stops[:, None]
    equal = (wanted == NO_TOKEN) | (wanted == window)
    return (equal.all(axis=-1) & (wanted[..., -1] != NO_TOKEN)).any(axis=-1)


def stop_array(stop_sequences: Any, batch: int, vocab_size: int) -> Any:
    """Stop sequences as int32 ``[batch, count, width]``, one of few sizes, filled up in front with -1.

    Args:
        stop_sequences: several sequences of ids; or an array ``[count, width]``, or ``[batch, count, width]`` for each
            row its own, where -1 fills up on either side. Traced ids are not checked.
        batch: rows.
        vocab_size: ids are below it.

    Raises:
        ValueError: not that, or an empty sequence; says what was expected and what came.
    """
    name, expected = "stop_sequences", "sequences of token ids, such as [[13, 198], [2]]"
    if isinstance(stop_sequences, str) or not isinstance(stop_sequences, Iterable):
        raise ValueError(f"{name}: expected {expected}, got {stop_sequences!r}")
    if not hasattr(stop_sequences, "shape") and not is_traced(stop_sequences):
        stop_sequences = _from_lists(name, expected, list(stop_sequences))
    ids = as_array(name, stop_sequences)
    if ids.ndim not in (2, 3) or (ids.ndim == 3 and ids.shape[0] != batch):
        shapes = f"the shape [count, width], or [{batch}, count, width] for each row its own"
        raise ValueError(f"{name}: expected {shapes}, got {list(ids.shape)}")
    if not is_traced(ids):
        outside = (ids < NO_TOKEN) | (ids >= vocab_size)
        if outside.any():
            raise ValueError(f"{name}: expected ids in 0..{vocab_size - 1} (-1: none), got {ids[outside][0]}")
        _check_unbroken(name, ids)
    xp: Any = jnp if is_traced(ids) else np
    # -1 goes to the front; what is left keeps its order.
    ids = xp.take_along_axis(ids.astype(np.int32), xp.argsort(ids != NO_TOKEN, axis=-1, stable=True), axis=-1)
    if not is_traced(ids):
        count, width = ids.shape[-2:]
        front = [(0, 0)] * (ids.ndim - 2) + [(0, _double(count) - count), (_double(width) - width, 0)]
        ids = np.pad(ids, front, constant_values=NO_TOKEN)
    return xp.broadcast_to(ids, (batch, *ids.shape[-2:]))


def _from_lists(name: str, expected: str, sequences: list[Any]) -> np.ndarray:
    rows = []
    for given in sequences:
        ids = np.asarray(given) if isinstance(given, Iterable) and not isinstance(given, str) else None
        if ids is None or ids.ndim != 1 or ids.dtype.kind not in "iu":
            if ids is not None and ids.size == 0:
                raise ValueError(f"{name}: expected at least one id in a sequence, got an empty one")
            raise ValueError(f"{name}: expected {expected}, got {given!r} in them")
        if (ids < 0).any():
            raise ValueError(f"{name}: expected ids of at least 0, got {given!r}")
        rows.append(ids)
    found = np.full((len(rows), max(map(len, rows), default=1)), NO_TOKEN, np.int64)
    for row, ids in zip(found, rows, strict=True):
        row[: len(ids)] = ids
    return found


def _check_unbroken(name: str, ids: np.ndarray) -> None:
    """That -1 stands only before or after a sequence's ids."""
    real = ids != NO_TOKEN
    runs = np.diff(real.astype(np.int8), axis=-1, prepend=0) == 1
    if (runs.sum(axis=-1) > 1).any():
        raise ValueError(f"{name}: expected -1 before or after a sequence's ids, got it between them")


def _double(size: int) -> int:
    """The smallest of 4, 8, 16, … that holds ``size``."""
    held = _LEAST_STOPS
    while held < size:
        held *= 2
    return held
