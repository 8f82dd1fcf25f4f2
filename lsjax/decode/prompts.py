"""Prompts as the compiled programs want them: left-aligned int32 rows, their lengths, and widths in few sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from lsjax.checks import check_tokens, is_traced
from lsjax.config import LlamaConfig


class Prompts(NamedTuple):
    """A batch of prompts.

    Attributes:
        tokens: int32 ``[batch, width]``, each row from the left.
        lengths: int32 ``[batch]``.
        single: whether the caller gave one row without a batch axis.
    """

    tokens: Any
    lengths: Any
    single: bool


def read_prompts(
    tokens: Any, prompt_lengths: Any, attention_mask: Any, config: LlamaConfig, *, least: int = 1
) -> Prompts:
    """Checks and left-aligns prompts; NumPy throughout where the input is concrete.

    Args:
        tokens: int ``[length]`` or ``[batch, length]``.
        prompt_lengths: int ``[batch]`` (or a scalar for one row), tokens of each right-padded row; or None.
        attention_mask: ``[batch, length]`` of 0 and 1 (or of bool), padded on the left or on the right; or None.
        config: the model's configuration.
        least: the fewest tokens a row may have.
    """
    if prompt_lengths is not None and attention_mask is not None:
        raise ValueError("give prompt_lengths or attention_mask, not both")
    rows, single = check_tokens(_with_padding_hidden(tokens, prompt_lengths, attention_mask), config)
    batch, width = rows.shape
    if attention_mask is not None:
        mask = attention_mask if is_traced(attention_mask) else np.asarray(attention_mask)
        mask = mask[None] if single and mask.ndim == 1 else mask
        if mask.shape != rows.shape:
            raise ValueError(f"attention_mask: expected the shape of tokens {rows.shape}, got {mask.shape}")
        rows, lengths = _align(rows, mask != 0)
    elif prompt_lengths is not None:
        lengths = prompt_lengths if is_traced(prompt_lengths) else np.asarray(prompt_lengths)
        lengths = lengths[None] if single and lengths.ndim == 0 else lengths
        if lengths.shape != (batch,) or not np.issubdtype(lengths.dtype, np.integer):
            raise ValueError(
                f"prompt_lengths: expected integers of shape ({batch},), got {lengths.dtype} {lengths.shape}"
            )
    else:
        lengths = np.full(batch, width)
    if not is_traced(lengths) and ((lengths < least) | (lengths > width)).any():
        row = int(np.argmax((lengths < least) | (lengths > width)))
        what = "an empty prompt" if lengths[row] == 0 else f"{lengths[row]}"
        raise ValueError(f"prompt lengths: expected {least}..{width} tokens a row, got {what} in row {row}")
    return Prompts(rows, lengths.astype(np.int32), single)


def bucket(size: int, least: int) -> int:
    """The smallest of ``least``, 1.5 ``least``, 2 ``least``, 3 ``least``, 4 ``least``, … that holds ``size``."""
    while size > least:
        if size <= least * 3 // 2:
            return least * 3 // 2
        least *= 2
    return least


def widen(tokens: Any, width: int, pad: int) -> Any:
    """Rows padded on the right to ``width``; only concrete rows, in NumPy, since it saves compilations there alone."""
    if is_traced(tokens) or tokens.shape[1] >= width:
        return tokens
    return np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])), constant_values=pad)


def _with_padding_hidden(tokens: Any, prompt_lengths: Any, attention_mask: Any) -> Any:
    """Concrete tokens with 0 in their padding, which may hold any id (-100, say) and is not checked."""
    if is_traced(tokens, prompt_lengths, attention_mask) or (prompt_lengths is None and attention_mask is None):
        return tokens
    try:
        rows = np.asarray(tokens)
        if attention_mask is not None:
            return np.where(np.asarray(attention_mask) != 0, rows, 0)
        return np.where(np.arange(rows.shape[-1]) < np.asarray(prompt_lengths)[..., None], rows, 0)
    except (ValueError, IndexError):
        return tokens  # the shapes do not fit; the checks that follow say how


def _align(rows: Any, mask: Any) -> tuple[Any, Any]:
    """Moves each row's tokens to the left end; a mask must be one unbroken run of ones."""
    xp: Any = jnp if is_traced(rows, mask) else np
    lengths = mask.sum(axis=1)
    first = mask.argmax(axis=1)
    column = np.arange(rows.shape[1])
    if xp is np:
        unbroken = (column >= first[:, None]) & (column < (first + lengths)[:, None])
        touches_an_end = (first == 0) | (first + lengths == rows.shape[1])
        bad = (unbroken != mask).any(axis=1) | ~touches_an_end
        if bad.any():
            raise ValueError(
                f"attention_mask: expected rows padded on the left or on the right, got {mask[bad][0].astype(int)} "
                f"in row {int(bad.argmax())}"
            )
    shifted = xp.minimum(column + first[:, None], rows.shape[1] - 1)
    rows = xp.take_along_axis(rows, shifted, axis=1)
    return xp.where(column < lengths[:, None], rows, 0), lengths
