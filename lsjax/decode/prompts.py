"""Prompts as the compiled programs want them: left-aligned int32 rows, their lengths, and widths in few sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lsjax.checks import as_array, check_vocabulary, is_traced, read_tokens
from lsjax.config import LlamaConfig
from lsjax.decode.folding import put_shared, take_shared

LEAST_WIDTH = 16  # the smallest bucket


class Prompts(NamedTuple):
    """A batch of prompts.

    Attributes:
        tokens: int32 ``[batch, width]``, each row from the left.
        lengths: int32 ``[batch]``.
        single: whether the caller gave one row without a batch axis.
        starts: int32 ``[batch]``, the caller's column where each row began; 0 for all.
    """

    tokens: Any
    lengths: Any
    single: bool
    starts: Any = 0

    @property
    def width(self) -> int:
        """Tokens of the widest row there could be."""
        return self.tokens.shape[1]

    @property
    def longest(self) -> int:
        """Tokens of the longest row, or the width where lengths are traced."""
        return self.width if is_traced(self.lengths) else int(self.lengths.max())

    @property
    def shortest(self) -> int:
        """Tokens of the shortest row, or the width where lengths are traced."""
        return self.width if is_traced(self.lengths) else int(self.lengths.min())


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
    rows, single = read_tokens(tokens)
    batch, width = rows.shape
    if width < least:
        raise ValueError(f"tokens: expected at least {least} tokens a row, got {width}")
    lengths: Any = np.full(batch, width)
    starts: Any = np.zeros(batch, np.int32)
    if attention_mask is not None:
        mask = as_array("attention_mask", attention_mask, kinds="biuf")
        mask = mask[None] if single and mask.ndim == 1 else mask
        if mask.shape != rows.shape:
            raise ValueError(f"attention_mask: expected the shape of tokens {rows.shape}, got {mask.shape}")
        rows, lengths, starts = _align(rows, mask)
    elif prompt_lengths is not None:
        lengths = as_array("prompt_lengths", prompt_lengths)
        lengths = lengths[None] if single and lengths.ndim == 0 else lengths
        if lengths.shape != (batch,):
            raise ValueError(f"prompt_lengths: expected integers of shape ({batch},), got {lengths.shape}")
    if not is_traced(lengths) and ((lengths < least) | (lengths > width)).any():
        row = int(np.argmax((lengths < least) | (lengths > width)))
        what = "an empty prompt" if lengths[row] == 0 else f"{lengths[row]}"
        raise ValueError(f"prompt lengths: expected {least}..{width} tokens a row, got {what} in row {row}")
    # Padding may hold any id (-100, say), so it is not checked.
    rows = check_vocabulary(rows, config, np.arange(width) < lengths[:, None])
    return Prompts(rows, lengths.astype(np.int32), single, starts.astype(np.int32))


def bucket(size: int, least: int) -> int:
    """The smallest of ``least``, 1.5 ``least``, 2 ``least``, 3 ``least``, 4 ``least``, … that holds ``size``."""
    while size > least:
        if size <= least * 3 // 2:
            return least * 3 // 2
        least *= 2
    return least


def to_bucket(tokens: Any, most: int | None = None) -> Any:
    """Rows padded on the right to one of few widths, at most ``most``; concrete rows alone, in NumPy."""
    if is_traced(tokens):
        return tokens
    width = bucket(tokens.shape[1], LEAST_WIDTH)
    width = width if most is None else min(width, most)
    return np.pad(tokens, ((0, 0), (0, max(width - tokens.shape[1], 0))))


def place_like(rows: Any, tokens: Any) -> Any:
    """Arrays ``[batch, ...]`` on the devices that the caller's ``tokens`` ``[batch, length]`` lie on, row by row.

    What the rows share lies whole on each.
    """
    sharding = getattr(tokens, "sharding", None)
    if not isinstance(sharding, NamedSharding) or tokens.ndim < 2:
        return rows
    given: Any = sharding.mesh
    mesh = Mesh(given.devices, given.axis_names)  # automatic axes
    rows, shared = take_shared(rows)
    rows = jax.device_put(rows, NamedSharding(mesh, PartitionSpec(*sharding.spec[:1])))
    return put_shared(rows, jax.device_put(shared, NamedSharding(mesh, PartitionSpec())))


def _align(rows: Any, mask: Any) -> tuple[Any, Any, Any]:
    """Moves each row's tokens to the left end, from where they start; a mask must be one unbroken run of ones."""
    xp: Any = jnp if is_traced(rows, mask) else np
    ones = mask != 0
    lengths, first = ones.sum(axis=1), ones.argmax(axis=1)
    column = np.arange(rows.shape[1])
    if xp is np:
        unbroken = (column >= first[:, None]) & (column < (first + lengths)[:, None])
        touches_an_end = (first == 0) | (first + lengths == rows.shape[1])
        bad = (unbroken != mask).any(axis=1) | ~touches_an_end
        if bad.any():
            raise ValueError(
                f"attention_mask: expected 0 and 1, rows padded on the left or on the right, got "
                f"{mask[bad][0].tolist()} in row {int(bad.argmax())}"
            )
    shifted = xp.minimum(column + first[:, None], rows.shape[1] - 1)
    return xp.take_along_axis(rows, shifted, axis=1), lengths, first
