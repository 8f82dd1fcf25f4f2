"""How often each layer already names the token that the whole model picks: what to look at before choosing an exit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lsjax.checks import check_int, check_params, is_traced
from lsjax.config import token_ids
from lsjax.decode.generate import generate
from lsjax.decode.prompts import LEAST_WIDTH, bucket, read_prompts, to_bucket
from lsjax.decode.request import choose_capacity
from lsjax.decode.sampling import greedy
from lsjax.measure.bandwidth import step_bytes
from lsjax.measure.replay import replay, wilson
from lsjax.params import Params


@dataclasses.dataclass(frozen=True, eq=False)
class Agreement:
    """What :func:`agreement` returns, NumPy throughout; index 0 of an axis of layers is an exit after one layer.

    ``str(found)`` is a table. Other numbers of drafts need no further run of the model:
    ``dataclasses.replace(found, num_speculations=2)``.

    Attributes:
        matches: bool ``[layers, batch, positions]``, whether a layer's greedy choice is the last layer's.
        lengths: int32 ``[batch]``, positions compared in each text.
        limits: int32 ``[batch]``, the most there could have been.
        ended: bool ``[batch]``, whether a text stopped at an EOS.
        generated: whether the texts are the model's own. If not, acceptance and what follows from it are estimates.
        parted: positions at which the last layer, reading a generated text at once, names another token than was
            written: ties of rounding, and in 16-bit weights coarser ones.
        draft_costs: float64 ``[layers]``, the bytes of weights that a draft reads (its layers, the final norm and the
            head) as a share of those that the whole model reads.
        num_speculations: drafts a round, K.
    """

    matches: np.ndarray
    lengths: np.ndarray
    limits: np.ndarray
    ended: np.ndarray
    generated: bool
    parted: int
    draft_costs: np.ndarray
    num_speculations: int

    @property
    def _compared(self) -> np.ndarray:
        return np.arange(self.matches.shape[2]) < self.lengths[:, None]

    @property
    def rate_per_prompt(self) -> np.ndarray:
        """float64 ``[layers, batch]``: the share of each text's positions at which a layer agrees with the last."""
        return (self.matches & self._compared).sum(axis=2) / np.maximum(self.lengths, 1)

    @property
    def rate(self) -> np.ndarray:
        """float64 ``[layers]``: the same over all texts."""
        return (self.matches & self._compared).sum(axis=(1, 2)) / max(int(self.lengths.sum()), 1)

    @property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        """float64 ``[layers]`` twice: the 95% Wilson interval of ``rate``, tokens taken as independent.

        Within one text they are not: see how far ``rate_per_prompt`` spreads, too.
        """
        return wilson((self.matches & self._compared).sum(axis=(1, 2)), np.full(len(self.matches), self.lengths.sum()))

    @functools.cached_property
    def stats(self) -> Any:
        """:class:`lsjax.Stats` of ``lsjax.generate(exit_layer=layer, num_speculations=K)``: int32 ``[layers, batch]``.

        Exact for generated texts, up to ties of rounding.
        """
        return replay(self.matches, self.lengths, self.limits, self.ended, self.num_speculations)

    @property
    def acceptance_rate(self) -> np.ndarray:
        """float64 ``[layers]``: accepted drafts / drafts, over all texts."""
        return self.stats.accepted.sum(axis=1) / np.maximum(self.stats.drafted.sum(axis=1), 1)

    @property
    def tokens_per_round(self) -> np.ndarray:
        """float64 ``[layers]``: new tokens / rounds, over all texts."""
        return self.stats.new_tokens.sum(axis=1) / np.maximum(self.stats.rounds.sum(axis=1), 1)

    @property
    def estimated_speed_up(self) -> np.ndarray:
        """float64 ``[layers]``: an estimate of the speed relative to autoregressive decoding, batch 1.

        It takes a step's time as the bytes of weights that it reads: a round reads the early layers and the head K
        times for its drafts, and the whole model once more for the last draft's early layers and the check. Caches,
        arithmetic and overheads are left out, so it holds, roughly, where memory bounds every step.
        """
        return self.tokens_per_round / (1 + self.num_speculations * self.draft_costs)

    @property
    def best_layer(self) -> int | None:
        """The exit, 1..num_layers - 1, with the largest estimated speed-up; None where no exit is faster than none."""
        speed_up = self.estimated_speed_up[:-1]
        if not len(speed_up) or speed_up.max() <= 1:
            return None
        return int(speed_up.argmax()) + 1

    def to_dict(self) -> dict[str, Any]:
        """The table for JSON, one object a layer."""
        low, high = self.interval
        per_prompt = self.rate_per_prompt
        layers = [
            {
                "layer": index + 1,
                "agreement": float(self.rate[index]),
                "interval": [float(low[index]), float(high[index])],
                "agreement_per_prompt": per_prompt[index].tolist(),
                "acceptance_rate": float(self.acceptance_rate[index]),
                "tokens_per_round": float(self.tokens_per_round[index]),
                "estimated_speed_up": float(self.estimated_speed_up[index]),
            }
            for index in range(len(self.matches))
        ]
        return {
            "generated": self.generated,
            "prompts": len(self.lengths),
            "tokens": int(self.lengths.sum()),
            "parted": self.parted,
            "num_speculations": self.num_speculations,
            "best_layer": self.best_layer,
            "layers": layers,
        }

    def __str__(self) -> str:
        low, high = self.interval
        lines = [f"layer  agreement  95% interval  accepted, K={self.num_speculations}  tokens/round  est. speed-up"]
        for index, rate in enumerate(self.rate):
            lines.append(
                f"{index + 1:>5}  {rate:>9.1%}  {f'{100 * low[index]:.1f}-{100 * high[index]:.1f}%':>12}  "
                f"{self.acceptance_rate[index]:>13.1%}  {self.tokens_per_round[index]:>12.2f}  "
                f"{self.estimated_speed_up[index]:>13.2f}{'  <- best' if index + 1 == self.best_layer else ''}"
            )
        lines.append("(est. speed-up: an estimate for steps bound by memory, from the weights that a round reads)")
        return "\n".join([*lines, "", self._verdict()])

    def _verdict(self) -> str:
        layers, texts, best = len(self.matches), len(self.lengths), self.best_layer
        what = "the model's own greedy text" if self.generated else "the given text"
        of = f"on {self.lengths.sum()} tokens of {what}, {texts} prompt{'s'[: texts > 1]}"
        if best is not None:
            return (
                f"Exit at layer {best} of {layers}: {of}, {self.rate[best - 1]:.1%} of its choices are the whole "
                f"model's, and rounds of {self.num_speculations} drafts would write "
                f"{self.tokens_per_round[best - 1]:.2f} tokens each, an estimated "
                f"{self.estimated_speed_up[best - 1]:.2f} times the speed of autoregressive decoding."
            )
        if layers == 1 or not self.num_speculations:
            return "Nothing can be gained with one layer, or without drafts."
        nearest = int(self.estimated_speed_up[:-1].argmax())
        return (
            f"No exit is expected to pay with {self.num_speculations} drafts a round: {of}, the nearest, layer "
            f"{nearest + 1} of {layers}, writes {self.tokens_per_round[nearest]:.2f} tokens a round, an estimated "
            f"{self.estimated_speed_up[nearest]:.2f} times the speed of autoregressive decoding. Models trained to "
            "exit early, as LayerSkip's are, agree far sooner."
        )


def agreement(
    params: Params,
    tokens: Any,
    *,
    prompt_lengths: Any = None,
    attention_mask: Any = None,
    max_new_tokens: int = 64,
    num_speculations: int = 4,
    eos_token_id: int | Iterable[int] | None = None,
    capacity: int | None = None,
) -> Agreement:
    """Measures, for every layer, how often it agrees with the last one, and what drafting with it would give.

    The whole model continues the prompts greedily; then one teacher-forced pass takes each layer's choice (final norm
    and head on its output, arXiv 2404.16710) after every position. A draft is used only where all drafts before it
    were right, so it read this very text: acceptance and tokens a round are those of ``lsjax.generate``, exactly, for
    every exit at the cost of about one generation.

    Args:
        params: the model.
        tokens: int ``[length]`` or ``[batch, length]``, the prompts.
        prompt_lengths: int ``[batch]``, tokens of each row of right-padded prompts.
        attention_mask: ``[batch, length]`` of 0 and 1, instead.
        max_new_tokens: tokens that the model writes after each prompt. 0: nothing is written and the prompts' own
            text is measured; acceptance is then an estimate, since the text's tokens need not be the model's.
        num_speculations: drafts a round, K.
        eos_token_id: as of ``lsjax.generate``.
        capacity: as of ``lsjax.generate``.

    Raises:
        ValueError: says what was expected and what came.

    Example:
        >>> found = lsjax.measure.agreement(params, tokens, max_new_tokens=128)
        >>> print(found)
        >>> found.best_layer, found.rate[3]  # of an exit after 4 layers
    """
    check_params(params)
    if is_traced(params, tokens, prompt_lengths, attention_mask):
        raise TypeError("agreement returns tables of NumPy: call it outside jit and vmap")
    num_speculations = check_int("num_speculations", num_speculations, 0)
    max_new_tokens = check_int("max_new_tokens", max_new_tokens, 0)
    prompts = read_prompts(tokens, prompt_lengths, attention_mask, params.config)
    if capacity is None:
        capacity = choose_capacity(params.config, prompts, max_new_tokens, eager=True)
    text, first, lengths = prompts.tokens, np.zeros_like(prompts.lengths), prompts.lengths
    limits, ended = lengths, np.zeros(lengths.shape, bool)
    if max_new_tokens:
        eos = params.config.eos_token_id if eos_token_id is None else token_ids("eos_token_id", eos_token_id)
        options = {"max_new_tokens": max_new_tokens, "eos_token_id": eos, "capacity": capacity}
        out = generate(params, text, prompt_lengths=prompts.lengths, **options)
        text, first = np.asarray(out.tokens), prompts.lengths - 1
        lengths = np.asarray(out.lengths) - prompts.lengths
        limits = np.full_like(lengths, max_new_tokens)
        last = np.take_along_axis(text, (first + lengths)[:, None], axis=1)[:, 0]
        ended = np.isin(last, eos)
    count = int(lengths.max())
    width = text.shape[1]
    choices = _choices(params, to_bucket(text), first, bucket(count, LEAST_WIDTH), capacity)
    choices = np.asarray(choices)[:, :, :count]
    column = np.arange(count)
    written = np.take_along_axis(text, np.minimum(first[:, None] + 1 + column, width - 1), axis=1)
    parted = (choices[-1] != written) & (column < lengths[:, None])
    return Agreement(
        matches=choices == choices[-1],
        lengths=lengths,
        limits=limits,
        ended=ended,
        generated=max_new_tokens > 0,
        parted=int(parted.sum()) if max_new_tokens else 0,
        draft_costs=draft_costs(params),
        num_speculations=num_speculations,
    )


@functools.partial(jax.jit, static_argnums=(3, 4))
def _choices(params: Params, tokens: jax.Array, first: jax.Array, count: int, capacity: int) -> jax.Array:
    """Each layer's greedy choice after positions ``first`` (``[batch]``) and on: int32 ``[layers, batch, count]``.

    Logits exist of one layer and one row at a time.
    """
    positions = jnp.minimum(first[:, None] + jnp.arange(count), tokens.shape[1] - 1)
    hidden, chosen = params.embed(tokens), []
    for layer in range(params.config.num_hidden_layers):
        hidden, _ = params.run_layers(hidden, (), 0, lo=layer, hi=layer + 1, capacity=capacity)
        read = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)
        choice = lax.map(lambda row: greedy(params.logits(row)), read)
        hidden, choice = lax.optimization_barrier((hidden, choice))  # this layer's choice before the next layer
        chosen.append(choice)
    return jnp.stack(chosen)


def draft_costs(params: Params) -> np.ndarray:
    """float64 ``[layers]``: bytes of weights that a draft of so many layers reads, as a share of the whole model's."""
    steps = [step_bytes(params, num_layers=layer + 1) for layer in range(params.config.num_hidden_layers)]
    return np.array(steps) / steps[-1]
