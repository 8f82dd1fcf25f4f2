"""How fast a model decodes here: its strategies on the same prompts, in turns, with what explains their speed."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lsjax.checks import check_int, check_params, is_traced
from lsjax.config import token_ids
from lsjax.decode.generate import GenerateOutput, generate, lower
from lsjax.decode.prefill import prefill
from lsjax.decode.prompts import Prompts, read_prompts
from lsjax.decode.request import (
    MAX_NEW_TOKENS,
    NUM_SPECULATIONS,
    check_capacity,
    choose_capacity,
    make_plan,
    warn_beyond_trained_length,
)
from lsjax.decode.round import decode_round
from lsjax.decode.state import Plan
from lsjax.measure.bandwidth import cache_bytes, read_bandwidth, weight_bytes
from lsjax.measure.benchmark_report import BASELINE, BenchmarkReport, StrategyReport
from lsjax.measure.difference import Difference, differences
from lsjax.measure.memory import device_peak_bytes, host_peak_bytes, program_bytes
from lsjax.measure.timing import Spread, Timings, time_in_turns
from lsjax.params import Model
from lsjax.prepared import DecodeParams

Progress = Callable[[str, int, int], Any]


def benchmark(
    params: Model,
    tokens: Any,
    *,
    prompt_lengths: Any = None,
    attention_mask: Any = None,
    batch_size: int | None = None,
    exit_layer: int | None = None,
    num_speculations: int = NUM_SPECULATIONS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    strategies: Sequence[str] | None = None,
    eos_token_id: int | Iterable[int] | None = None,
    capacity: int | None = None,
    repetitions: int = 5,
    bandwidth: float | None = None,
    progress: Progress | None = None,
) -> BenchmarkReport:
    """Measures the speed of decoding strategies on the same prompts, each beside the autoregressive baseline.

    Every strategy continues every batch of prompts once to compile, then once a repetition, batch by batch in turns.
    Two things are timed: the whole of ``lsjax.generate``, and the time to the first token, which is ``lsjax.prefill``
    and one ``lsjax.decode_round``, as streaming runs them. What ``generate`` takes beyond that is the time of its
    further rounds; their bytes of weights and cache over it, over the largest read bandwidth measured in the same run,
    is the bandwidth utilisation. The texts of self-speculative decoding are compared with the baseline's.

    Args:
        params: the model; ``lsjax.prepare(params)`` decodes faster.
        tokens: int ``[length]`` or ``[prompts, length]``.
        prompt_lengths: int ``[prompts]``, tokens of each row of right-padded prompts.
        attention_mask: ``[prompts, length]`` of 0 and 1, instead.
        batch_size: prompts at a time, in their order; the last batch may be smaller. None: all at once.
        exit_layer: as of ``lsjax.generate``.
        num_speculations: likewise.
        max_new_tokens: likewise.
        strategies: those to measure beside the autoregressive baseline; None: self-speculative decoding where there is
            an exit layer.
        eos_token_id: what ends a text; None: the checkpoint's; ``()``: nothing, so that all texts are equally long.
        capacity: as of ``lsjax.generate``; all batches share it.
        repetitions: timed runs of each strategy, at least 1.
        bandwidth: bytes a second; None: measured, last of all (:func:`~lsjax.measure.bandwidth.read_bandwidth`).
        progress: called before each run with its strategy, how many runs are done, and how many there are.

    Raises:
        ValueError: says what was expected and what came.

    Example:
        >>> found = lsjax.measure.benchmark(lsjax.prepare(params), tokens, exit_layer=4, max_new_tokens=64)
        >>> print(found)
        >>> found["self_speculative"].speed_up.median, found.ok
    """
    check_params(params)
    if is_traced(params, tokens, prompt_lengths, attention_mask):
        raise TypeError("benchmark takes times: call it outside jit and vmap")
    prompts = read_prompts(tokens, prompt_lengths, attention_mask, params.config)
    max_new_tokens = check_int("max_new_tokens", max_new_tokens, 1)
    plans = _plans(params, strategies, exit_layer, num_speculations)
    size = len(prompts.tokens) if batch_size is None else check_int("batch_size", batch_size, 1)
    needed = prompts.longest + max_new_tokens
    if capacity is None:
        capacity = choose_capacity(params.config, prompts, max_new_tokens, eager=True)
    eos = params.config.eos_token_id if eos_token_id is None else token_ids("eos_token_id", eos_token_id)
    options = {
        "exit_layer": exit_layer,
        "num_speculations": num_speculations,
        "max_new_tokens": max_new_tokens,
        "eos_token_id": eos,
        "capacity": check_capacity(capacity, prompts.width, needed),
    }
    warn_beyond_trained_length(params.config, needed)
    run = _Run(params, _split(prompts, size), options)
    device = _only_device(params)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* exceed the length that the model was trained for")  # said above, once
        timings = run.time(plans, repetitions, progress)
        memory = {strategy: run.memory_bytes(strategy) for strategy in plans}
    host_peak = host_peak_bytes()  # without the array that the bandwidth is measured on
    if bandwidth is None and device is not None:
        bandwidth = read_bandwidth(device)
    reports: dict[str, StrategyReport] = {}
    for strategy, plan in plans.items():
        reports[strategy] = run.report(strategy, plan, timings, memory[strategy], bandwidth, reports.get(BASELINE))
    return BenchmarkReport(
        strategies=tuple(reports.values()),
        prompt_lengths=tuple(prompts.lengths.tolist()),
        batch_size=size,
        max_new_tokens=max_new_tokens,
        exit_layer=exit_layer,
        num_speculations=num_speculations,
        num_layers=params.config.num_hidden_layers,
        dtype=str(params.dtype),
        prepared=isinstance(params, DecodeParams),
        repetitions=repetitions,
        bandwidth=bandwidth,
        host_peak_bytes=host_peak,
        device_peak_bytes=device_peak_bytes(device),
        device=jax.default_backend() if device is None else device.device_kind,
        jax_version=jax.__version__,
    )


def _plans(
    params: Model, strategies: Sequence[str] | None, exit_layer: int | None, num_speculations: int
) -> dict[str, Plan]:
    """The strategies to measure, the baseline first, checked."""
    if strategies is None:
        strategies = () if exit_layer is None else ("self_speculative",)
    if isinstance(strategies, str):
        raise ValueError(f"strategies: expected a sequence of names, got {strategies!r}")
    names = dict.fromkeys((BASELINE, *strategies))
    return {strategy: make_plan(params.config, exit_layer, num_speculations, strategy) for strategy in names}


def _split(prompts: Prompts, size: int) -> list[Prompts]:
    """Batches, each as wide as its own longest prompt."""
    batches = []
    for first in range(0, len(prompts.tokens), size):
        lengths = prompts.lengths[first : first + size]
        batches.append(Prompts(prompts.tokens[first : first + size, : lengths.max()], lengths, single=False))
    return batches


def _only_device(params: Model) -> Any:
    """Where the model lies; None where that is several devices."""
    found = {
        device for leaf in jax.tree.leaves(params) if isinstance(leaf, jax.Array) for device in leaf.devices()
    } or {jax.devices()[0]}
    return found.pop() if len(found) == 1 else None


class _Rounds(NamedTuple):
    """The rounds of all batches after the first of each: how many, and the bytes that they must read."""

    number: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class _Run:
    """What one benchmark runs: batches of prompts, all with the same options of ``lsjax.generate``."""

    params: Model
    batches: list[Prompts]
    options: dict[str, Any]

    def generate(self, strategy: str, batch: Prompts) -> GenerateOutput:
        """All of a batch's texts."""
        return generate(self.params, batch.tokens, prompt_lengths=batch.lengths, strategy=strategy, **self.options)

    def first_token(self, strategy: str, batch: Prompts) -> jax.Array:
        """The lengths after the first round; what else the state holds is waited for, too, and let go."""
        state = prefill(self.params, batch.tokens, prompt_lengths=batch.lengths, strategy=strategy, **self.options)
        return jax.block_until_ready(decode_round(self.params, state)).lengths

    def time(self, strategies: Iterable[str], repetitions: int, progress: Progress | None) -> Timings:
        """Times by batch, strategy and what is timed, in that order."""
        calls = {
            (index, strategy, timed.__name__): functools.partial(timed, strategy, batch)
            for index, batch in enumerate(self.batches)
            for strategy in strategies
            for timed in (self.first_token, self.generate)
        }
        done = 0

        def tell(name: tuple[int, str, str], repetition: int) -> None:
            nonlocal done
            if progress is not None:
                progress(name[1] if repetition else f"{name[1]} (compiling)", done, len(calls) * (repetitions + 1))
            done += 1

        return time_in_turns(calls, repetitions=repetitions, progress=tell)

    def memory_bytes(self, strategy: str) -> int | None:
        """What ``generate``'s program holds for the largest batch."""
        largest = max(self.batches, key=lambda batch: batch.tokens.shape)
        options = {"prompt_lengths": largest.lengths, "strategy": strategy, **self.options}
        return program_bytes(lower(self.params, largest.tokens, **options).compile())

    def report(
        self,
        strategy: str,
        plan: Plan,
        timings: Timings,
        memory_bytes: int | None,
        bandwidth: float | None,
        baseline: StrategyReport | None,
    ) -> StrategyReport:
        """One strategy's numbers; without a baseline, it is the baseline."""
        indices = range(len(self.batches))
        whole = timings.total([(index, strategy, "generate") for index in indices])
        first = timings.total([(index, strategy, "first_token") for index in indices])
        outputs = [jax.tree.map(np.asarray, out) for out in whole.result]
        texts = [
            row[begin:end].tolist()
            for batch, out in zip(self.batches, outputs, strict=True)
            for row, begin, end in zip(out.tokens, batch.lengths, out.lengths, strict=True)
        ]
        rounds = self._later_rounds(plan, outputs)
        round_seconds = round_bytes = utilization = None
        if rounds.number:
            round_bytes = rounds.num_bytes / rounds.number
            spans = zip(whole.seconds.values, first.seconds.values, strict=True)
            later = Spread(tuple((all_ - one) / rounds.number for all_, one in spans))
            if min(later.values) > 0:  # tiny models: the start of a call takes longer than its rounds
                round_seconds = later
                utilization = round_bytes / later.median / bandwidth if bandwidth else None
        speed_up = Spread((1.0,) * len(whole.seconds.values))
        if baseline is not None:
            share = sum(map(len, texts)) / baseline.new_tokens
            pairs = zip(baseline.seconds.values, whole.seconds.values, strict=True)
            speed_up = Spread(tuple(share * plain / ours for plain, ours in pairs))
        return StrategyReport(
            strategy=strategy,
            texts=texts,
            stats=jax.tree.map(lambda *parts: np.concatenate(parts), *(out.stats for out in outputs)),
            seconds=whole.seconds,
            first_token_seconds=first.seconds.map(lambda seconds: seconds / len(self.batches)),
            round_seconds=round_seconds,
            round_bytes=round_bytes,
            bandwidth_utilization=utilization,
            speed_up=speed_up,
            compile_seconds=whole.compile_seconds,
            memory_bytes=memory_bytes,
            differences=self._differences(baseline, texts) if baseline and strategy == "self_speculative" else None,
        )

    def _later_rounds(self, plan: Plan, outputs: Sequence[GenerateOutput]) -> _Rounds:
        """A batch runs as many rounds as its longest row, and drafts as often as some row has use for.

        Each pass reads the weights that it runs once, and the cache of each row that goes on up to where that row is:
        half of its new tokens on the average.
        """
        first_drafts = min(plan.num_speculations, self.options["max_new_tokens"] - 1)
        number = num_bytes = 0
        for batch, out in zip(self.batches, outputs, strict=True):
            stats, middle = out.stats, (batch.lengths + out.lengths) / 2
            rounds, drafts = np.maximum(stats.rounds - 1, 0), np.maximum(stats.drafted - first_drafts, 0)
            number += int(rounds.max())
            for depth, passes in ((plan.num_layers, rounds), (plan.exit_layer, drafts)):
                num_bytes += int(passes.max()) * weight_bytes(self.params, depth)
                num_bytes += cache_bytes(self.params, depth, passes * middle)
        return _Rounds(number, num_bytes)

    def _differences(self, baseline: StrategyReport, texts: list[list[int]]) -> tuple[Difference, ...]:
        prompts = [row[:length] for batch in self.batches for row, length in zip(*batch[:2], strict=True)]
        return tuple(differences(self.params, prompts, baseline.texts, texts, capacity=self.options["capacity"]))
