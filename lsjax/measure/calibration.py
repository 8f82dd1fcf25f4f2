"""The acceptance of drafts in generation: measured, and for synthetic models brought to a wanted value."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lsjax.checks import check_int
from lsjax.config import LlamaConfig
from lsjax.decode.generate import generate
from lsjax.decode.state import Stats
from lsjax.measure.replay import replay
from lsjax.measure.synthetic import check_exit, scale_deep_layers

_FIRST_SCALE = 0.05  # where calibration begins
_COARSE = (2, 4)  # rows of random text for the first steps, which only have to come near
_SEARCHED = 2  # times a generation's rows of random text, for the step after those


@dataclasses.dataclass(frozen=True, eq=False)
class Acceptance:
    """What self-speculative generation did with some prompts.

    Attributes:
        tokens: int32 ``[batch, new]``, the new tokens.
        stats: NumPy, as of ``lsjax.generate``.
    """

    tokens: np.ndarray
    stats: Stats

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / drafts, over all rows."""
        return float(self.stats.accepted.sum() / max(self.stats.drafted.sum(), 1))

    @property
    def standard_error(self) -> float:
        """Of ``acceptance_rate``, as far as the rows' own rates tell: other prompts give other rates."""
        rates = self.stats.accepted / np.maximum(self.stats.drafted, 1)
        return float(rates.std(ddof=1) / math.sqrt(len(rates))) if len(rates) > 1 else math.nan

    @property
    def tokens_per_round(self) -> float:
        """New tokens / rounds, over all rows."""
        return float(self.stats.new_tokens.sum() / max(self.stats.rounds.sum(), 1))

    @property
    def new_tokens(self) -> int:
        """Of all rows."""
        return int(self.stats.new_tokens.sum())

    @property
    def shortest_cycle(self) -> int | None:
        """As of :func:`shortest_cycle`, in any row."""
        return shortest_cycle(self.tokens)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "acceptance_rate": round(self.acceptance_rate, 4),
            "standard_error": round(self.standard_error, 4),
            "tokens_per_round": round(self.tokens_per_round, 3),
            "new_tokens": self.new_tokens,
            "drafted": int(self.stats.drafted.sum()),
            "shortest_cycle": self.shortest_cycle,
        }


def shortest_cycle(tokens: np.ndarray) -> int | None:
    """The shortest period of any stretch of any row that repeats itself; None where none does.

    A stretch counts if it holds its period three times and is at least 8 tokens long; it may end before the row does.

    Args:
        tokens: int ``[batch, length]`` or ``[length]``, without padding.
    """
    rows = np.atleast_2d(tokens)
    for period in range(1, rows.shape[1] // 3 + 1):
        same = rows[:, period:] == rows[:, :-period]
        # A stretch of n tokens repeats at n - period places in a row.
        window = max(3 * period, 8) - period
        counts = np.cumsum(np.pad(same, ((0, 0), (1, 0))), axis=1)
        if same.shape[1] >= window and (counts[:, window:] - counts[:, :-window] == window).any():
            return period
    return None


def measure_acceptance(
    params: Any, prompts: Any, *, exit_layer: int, num_speculations: int = 4, max_new_tokens: int = 136
) -> Acceptance:
    """Generates greedily with self-speculative decoding, no EOS, and says what was accepted.

    Args:
        params: the model, prepared or not.
        prompts: int ``[batch, length]``, rows of equal length.
        exit_layer: as of ``lsjax.generate``, like the rest.
        num_speculations: drafts a round.
        max_new_tokens: new tokens a row.
    """
    plan: Any = {"exit_layer": exit_layer, "num_speculations": num_speculations}
    out = generate(params, prompts, max_new_tokens=max_new_tokens, eos_token_id=(), **plan)
    tokens, stats = jax.tree.map(np.asarray, (out.tokens, out.stats))
    return Acceptance(tokens[:, -max_new_tokens:], stats)


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """What :func:`calibrate` found.

    Attributes:
        scale: of the layers after the exit, for :func:`agreeing_params` or :func:`scale_deep_layers`.
        found: the generation at this scale that confirmed it.
        tried: the scales that were generated with, this one last, and the acceptance of each.
    """

    scale: float
    found: Acceptance
    tried: tuple[tuple[float, float], ...]


def calibrate(
    params: Any,
    *,
    exit_layer: int,
    acceptance: float,
    key: jax.Array,
    num_speculations: int = 4,
    batch: int = 16,
    prompt_length: int = 16,
    max_new_tokens: int = 136,
    tolerance: float = 0.03,
    attempts: int = 4,
) -> Calibration:
    """Finds the scale of a model's deep layers at which a wanted share of drafts is accepted.

    A teacher-forced pass at one scale tells the acceptance at all scales near it: where the deep layers add ``d`` to
    the exit's ``h``, the choice from ``h + t d`` first differs from that of ``h`` at a ``t`` that follows from both
    logits. The scale is solved for on random text, which is what a random model writes, and confirmed by generation;
    while that is off, it is solved for anew on the texts so far together.

    The scale holds for other prompts as far as chance lets it: with texts of N tokens in all, acceptance spreads by
    about 0.8 / sqrt(N).

    Args:
        params: a model whose deep layers have the scale 1, as ``agreeing_params(scale=1)``; prepared or not, of any
            dtype, on any device.
        exit_layer: layers that draft, 1..num_hidden_layers - 1.
        acceptance: wanted accepted drafts / drafts, above 0 and below 1.
        key: draws the prompts.
        num_speculations: drafts a round, on which acceptance depends.
        batch: prompts.
        prompt_length: tokens of each.
        max_new_tokens: new tokens of each.
        tolerance: how far generation's acceptance may lie from the wanted one.
        attempts: generations at most.

    Raises:
        ValueError: an argument out of range, or nothing within the tolerance after all attempts.

    Example:
        >>> params = lsjax.measure.agreeing_params(config, exit_layer=4, scale=1, key=jax.random.key(0))
        >>> found = lsjax.measure.calibrate(params, exit_layer=4, acceptance=0.75, key=jax.random.key(1))
        >>> params = lsjax.measure.scale_deep_layers(params, 4, found.scale)
    """
    exit_layer = check_exit(params, exit_layer)
    if not 0 < acceptance < 1:
        raise ValueError(f"acceptance: expected a share above 0 and below 1, got {acceptance!r}")
    drafts, batch = check_int("num_speculations", num_speculations, 1), check_int("batch", batch, 1)
    width = check_int("prompt_length", prompt_length, 1) + check_int("max_new_tokens", max_new_tokens, 2)
    text = np.asarray(jax.random.randint(key, (_SEARCHED * batch, width), 0, params.config.vocab_size))
    prompts, scale, tried = text[:batch, :prompt_length], _FIRST_SCALE, []

    def solve(rows: np.ndarray, scale: float) -> float:
        model = scale_deep_layers(params, exit_layer, scale)
        flips = np.asarray(_flips(model, rows, exit_layer))[:, prompt_length - 1 : -1]
        return scale * _factor(flips, drafts, acceptance)

    for rows in _COARSE:
        scale = solve(text[:rows], scale)
    for _ in range(check_int("attempts", attempts, 1)):
        scale = solve(text, scale)
        model = scale_deep_layers(params, exit_layer, scale)
        found = measure_acceptance(
            model, prompts, exit_layer=exit_layer, num_speculations=drafts, max_new_tokens=max_new_tokens
        )
        del model
        tried.append((scale, found.acceptance_rate))
        if abs(found.acceptance_rate - acceptance) <= tolerance:
            return Calibration(scale, found, tuple(tried))
        text = np.concatenate([text, np.concatenate([prompts, found.tokens], axis=1)])
    listed = ", ".join(f"{rate:.3f} at scale {scale:.4g}" for scale, rate in tried)
    raise ValueError(f"acceptance: expected {acceptance} within {tolerance}, got {listed}")


def _factor(flips: np.ndarray, drafts: int, acceptance: float) -> float:
    """By bisection, the factor at which texts that leave the exit's choice at ``flips`` have this acceptance."""
    lengths = np.full(len(flips), flips.shape[1])

    def rate(factor: float) -> float:
        stats = replay((flips > factor)[None], lengths, lengths, np.zeros(len(flips), bool), drafts)
        return float(stats.accepted.sum() / stats.drafted.sum())

    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if rate(middle) > acceptance else (low, middle)
    return math.sqrt(low * high)


@functools.partial(jax.jit, static_argnums=2)
def _flips(params: Any, tokens: jax.Array, exit_layer: int) -> jax.Array:
    """How many times what the deep layers add it would take to change the exit's choice: float32 ``[batch, length]``.

    Infinite where no token gains on the exit's choice. Below 1: exit and whole model disagree. Logits exist of one row
    at a time.
    """
    early, _ = params.run_layers(params.embed(tokens), (), 0, hi=exit_layer)
    late, _ = params.run_layers(early, (), 0, lo=exit_layer)

    def one(pair: tuple[jax.Array, jax.Array]) -> jax.Array:
        # Logits are linear in the hidden state but for its norm.
        first, last = (params.logits(hidden) * _norm(hidden, params.config) for hidden in pair)
        chosen = jnp.argmax(first, axis=-1, keepdims=True)
        added = last - first
        lead, gain = (x - jnp.take_along_axis(x, chosen, axis=-1) for x in (first, added))
        return jnp.where(gain > 0, -lead / gain, jnp.inf).min(axis=-1)

    return lax.map(one, (early, late))


def _norm(hidden: jax.Array, config: LlamaConfig) -> jax.Array:
    mean_square = jnp.square(hidden.astype(jnp.float32)).mean(axis=-1, keepdims=True)
    return jnp.sqrt(mean_square + config.rms_norm_eps)
