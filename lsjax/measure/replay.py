"""What draft-verify rounds would have done, from where the drafting layers agree with the text: no model is run."""

from __future__ import annotations

from typing import Any

import numpy as np

from lsjax.decode.state import Stats


def replay(
    matches: np.ndarray, lengths: np.ndarray, limits: np.ndarray, ended: np.ndarray, num_speculations: int
) -> Stats:
    """The statistics of self-speculative decoding, by the rule of a round (:mod:`lsjax.decode.round`).

    A draft is only ever looked at where all drafts before it were right, so that it read the whole model's own text:
    whether a layer, reading that text, names its next token is all that a round depends on.

    Args:
        matches: bool ``[layers, batch, positions]``, whether a layer names the text's new token number j.
        lengths: int ``[batch]``, new tokens of each text, an EOS included; what lies behind them is not read.
        limits: int ``[batch]``, new tokens that each text might have had.
        ended: bool ``[batch]``, whether the last of them is an EOS.
        num_speculations: drafts a round, K.

    Returns:
        as of ``lsjax.generate(exit_layer=layer)`` for each layer: int32 ``[layers, batch]``, the histogram
        ``[layers, batch, K + 1]``; NumPy arrays.
    """
    layers, batch, positions = matches.shape
    column = np.arange(positions)
    streaks = _streaks(matches & (column < lengths[:, None]))
    end = np.where(ended, lengths - 1, limits + num_speculations)  # where an EOS stands, or out of reach
    counts: Any = np.zeros((4, layers, batch), np.int32)
    rounds, drafted, accepted, new = counts
    histogram: Any = np.zeros((layers, batch, num_speculations + 1), np.int32)
    while (active := new < lengths).any():
        useful = np.clip(limits - new - 1, 0, num_speculations)
        here = np.minimum(new, positions - 1)
        kept = np.minimum(np.take_along_axis(streaks, here[..., None], axis=2)[..., 0], useful)
        before_end = end - new  # drafts in front of the EOS; the one that is the EOS itself may be kept too
        committed = np.minimum(kept, before_end) + 1
        rounds += active
        drafted += active * np.minimum(useful, np.where(kept >= before_end, before_end + 1, num_speculations))
        accepted += active * kept
        histogram += active[..., None] * (kept[..., None] == np.arange(num_speculations + 1))
        new += active * committed
    return Stats(rounds, drafted, accepted, new, histogram)


def _streaks(matches: np.ndarray) -> np.ndarray:
    """How many matches in a row begin at each position, along the last axis."""
    streaks = np.zeros((*matches.shape[:-1], matches.shape[-1] + 1), np.int32)
    for index in reversed(range(matches.shape[-1])):
        streaks[..., index] = (streaks[..., index + 1] + 1) * matches[..., index]
    return streaks[..., :-1]


def wilson(successes: np.ndarray, trials: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 95% interval of a share (Wilson, 1927), as if the trials were independent; 0 to 1 without any."""
    z, count = 1.959964, np.maximum(trials, 1)
    share = successes / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    some = trials > 0
    return np.where(some, np.maximum(middle - half, 0), 0.0), np.where(some, np.minimum(middle + half, 1), 1.0)
