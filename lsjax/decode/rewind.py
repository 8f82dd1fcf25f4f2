"""``rewind``: a decode state with fewer committed tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsjax.checks import as_array, check_int, is_traced
from lsjax.decode.state import DecodeState


def rewind(state: DecodeState, lengths: Any, *, max_new_tokens: int | None = None) -> DecodeState:
    """Takes back each row's last tokens, so that another text can follow the ones that stay.

    Keys and values lie at their positions, so a shorter row needs no other cache: nothing is computed, and what lies
    past the length is garbage that the next tokens cover. Rows that were done go on, and what they write is new text to
    stop sequences and processors. Statistics keep what was done, and draws stay keyed by position: the same key draws
    the same tokens again after the same text.

    Args:
        state: of :func:`~lsjax.decode.prefill.prefill` or of a round. Either state can be continued, but only until one
            of them goes into a round, which takes the cache that they share.
        lengths: int ``[batch]``, or one for all rows: the tokens to keep, from 1 to the row's length.
        max_new_tokens: rows are done after so many new tokens; None: at the capacity.

    Returns:
        the state at these lengths.

    Raises:
        ValueError: no such length. Inside ``jit`` it is taken to be the nearest one.

    Example:
        >>> state = lsjax.rewind(state, 12)
        >>> state = lsjax.prefill(params, other_tokens, state=state)
    """
    if not isinstance(state, DecodeState):
        raise TypeError(f"state: expected a DecodeState, as lsjax.prefill makes it, got {type(state).__name__}")
    batch = state.tokens.shape[0]
    kept = as_array("lengths", lengths)
    if kept.shape not in ((), (batch,)):
        raise ValueError(f"lengths: expected an int or one for each of {batch} rows, got the shape {list(kept.shape)}")
    new = None if max_new_tokens is None else check_int("max_new_tokens", max_new_tokens, 1)
    if not is_traced(state, kept):
        held = np.asarray(state.lengths)
        outside = (kept < 1) | (kept > held)
        if outside.any():
            row = int(np.argmax(outside))
            raise ValueError(
                f"lengths: expected 1..{held[row]} tokens to keep of row {row}, got {np.broadcast_to(kept, batch)[row]}"
            )
    xp: Any = jnp if is_traced(kept) else np
    allowed = None if new is None else np.full(batch, new, np.int32)
    found = _rewind(state.replace(cache=()), xp.broadcast_to(kept, (batch,)).astype(np.int32), allowed)
    return found.replace(cache=state.cache)  # not through the program, which would copy it


@jax.jit
def _rewind(state: DecodeState, kept: jax.Array, max_new_tokens: jax.Array | None) -> DecodeState:
    slots = state.tokens.shape[1]
    lengths = jnp.clip(kept, 1, state.lengths)
    # The capacity, which a state without its cache knows too.
    limits = jnp.full_like(lengths, state.capacity)
    if max_new_tokens is not None:
        limits = jnp.minimum(lengths + max_new_tokens, limits)
    given = jnp.arange(slots) < lengths[:, None]
    return state.replace(
        tokens=jnp.where(given, state.tokens, state.pad[:, None]),
        lengths=lengths,
        limits=limits,
        done=lengths >= limits,
        begins=lengths,
        scores=None if state.scores is None else state.scores.where(given),
    )
