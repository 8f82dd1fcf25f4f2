"""What a benchmark found: numbers of each strategy, as a table for people and as one object for JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from lsjax.decode.state import Stats
from lsjax.measure.difference import Difference
from lsjax.measure.timing import Spread
from lsjax.measure.verdict import histogram_line, speed_verdict

BASELINE = "autoregressive"


@dataclasses.dataclass(frozen=True, eq=False)
class StrategyReport:
    """One strategy's part of a benchmark. Spreads hold one value a repetition.

    Attributes:
        strategy: its name.
        texts: each prompt's new tokens.
        stats: as of ``lsjax.generate``, all prompts; NumPy arrays.
        seconds: of ``lsjax.generate`` over all batches.
        first_token_seconds: from the call to the end of the first round, the mean over batches.
        round_seconds: of one round after the first (of a step, where nothing is drafted), the mean over all; None
            where no batch had a second round, or it took no longer than the clock can tell.
        round_bytes: bytes of weights and cache that such a round must read, each once a pass, the mean over all; None
            where there was none. With drafts that end at an EOS it may be a little too low.
        bandwidth_utilization: ``round_bytes`` over the median ``round_seconds`` over the read bandwidth; None where
            one of them is.
        speed_up: tokens a second over the baseline's, each repetition against its neighbour.
        compile_seconds: what the first run of ``generate`` on every batch took longer than later ones; little, where
            JAX finds the programs in its persistent cache (the command keeps one).
        memory_bytes: what the compiled ``generate`` holds for the largest batch, on each device: weights, cache and
            temporaries; None where XLA does not say.
        differences: prompts whose text is not the baseline's; None where it need not be.
    """

    strategy: str
    texts: list[list[int]]
    stats: Stats
    seconds: Spread
    first_token_seconds: Spread
    round_seconds: Spread | None
    round_bytes: float | None
    bandwidth_utilization: float | None
    speed_up: Spread
    compile_seconds: float
    memory_bytes: int | None
    differences: tuple[Difference, ...] | None

    @property
    def new_tokens(self) -> int:
        """New tokens of all prompts."""
        return sum(map(len, self.texts))

    @property
    def tokens_per_second(self) -> Spread:
        """New tokens of all prompts over ``seconds``: the prompts' own passes count, compilation does not."""
        return self.seconds.map(lambda seconds: self.new_tokens / seconds)

    @property
    def drafted(self) -> int:
        """Drafts, over all prompts."""
        return int(self.stats.drafted.sum())

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / drafts, over all prompts; 0 where nothing was drafted."""
        return float(self.stats.accepted.sum() / max(self.drafted, 1))

    @property
    def tokens_per_round(self) -> float:
        """New tokens / rounds, over all prompts."""
        return float(self.stats.new_tokens.sum() / max(int(self.stats.rounds.sum()), 1))

    @property
    def accept_histogram(self) -> list[int]:
        """Rounds by the number of drafts that they kept, over all prompts."""
        return self.stats.accept_histogram.sum(axis=0).tolist()

    def to_dict(self, dtype: str) -> dict[str, Any]:
        """The numbers for JSON, without the texts."""
        parted = self.differences
        return {
            "new_tokens": self.new_tokens,
            "tokens_per_second": self.tokens_per_second.to_dict(),
            "seconds": self.seconds.to_dict(),
            "speed_up": self.speed_up.to_dict(),
            "first_token_seconds": self.first_token_seconds.to_dict(),
            "round_seconds": None if self.round_seconds is None else self.round_seconds.to_dict(),
            "round_bytes": self.round_bytes,
            "bandwidth_utilization": self.bandwidth_utilization,
            "rounds": int(self.stats.rounds.sum()),
            "drafted": self.drafted,
            "accepted": int(self.stats.accepted.sum()),
            "acceptance_rate": self.acceptance_rate,
            "tokens_per_round": self.tokens_per_round,
            "accept_histogram": self.accept_histogram,
            "compile_seconds": self.compile_seconds,
            "memory_bytes": self.memory_bytes,
            "differences": None if parted is None else [one.to_dict(BASELINE, self.strategy, dtype) for one in parted],
        }


@dataclasses.dataclass(frozen=True, eq=False)
class BenchmarkReport:
    """What :func:`~lsjax.measure.benchmark.benchmark` returns. ``str(report)`` is a table.

    Attributes:
        strategies: the baseline first.
        prompt_lengths: tokens of each prompt.
        batch_size: prompts at a time.
        max_new_tokens: new tokens a prompt, at most.
        exit_layer: layers that drafted, or wrote alone; None without.
        num_speculations: drafts a round.
        num_layers: of the model.
        dtype: the weights'.
        prepared: whether the weights were prepared (``lsjax.prepare``).
        repetitions: timed runs of each strategy.
        bandwidth: bytes a second, the largest at which memory was read; None where it was not measured.
        host_peak_bytes: the largest size of the process so far.
        device_peak_bytes: the most that was in use on the accelerator so far; None on CPUs.
        device: what the model ran on.
        jax_version: JAX's.
    """

    strategies: tuple[StrategyReport, ...]
    prompt_lengths: tuple[int, ...]
    batch_size: int
    max_new_tokens: int
    exit_layer: int | None
    num_speculations: int
    num_layers: int
    dtype: str
    prepared: bool
    repetitions: int
    bandwidth: float | None
    host_peak_bytes: int | None
    device_peak_bytes: int | None
    device: str
    jax_version: str

    def __getitem__(self, strategy: str) -> StrategyReport:
        """The part of the strategy of that name."""
        for report in self.strategies:
            if report.strategy == strategy:
                return report
        raise KeyError(f"{strategy!r}: expected one of {', '.join(report.strategy for report in self.strategies)}")

    @property
    def ties(self) -> int:
        """Texts that are not the baseline's because rounding decided a tie."""
        return sum(one.is_tie(self.dtype) for report in self.strategies for one in report.differences or ())

    @property
    def ok(self) -> bool:
        """Whether all texts that must be the baseline's are, up to ties of rounding."""
        return self.ties == sum(len(report.differences or ()) for report in self.strategies)

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        plain = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "strategies"
        }
        strategies = {report.strategy: report.to_dict(self.dtype) for report in self.strategies}
        verdict = {"ok": self.ok, "ties": self.ties, "identical": self.ok and not self.ties}
        return plain | {"prompt_lengths": list(self.prompt_lengths)} | verdict | {"strategies": strategies}

    def __str__(self) -> str:
        head = ["strategy", "tokens/s", "quartiles", "speed-up", "1st token", "round", "bandwidth", "accepted"]
        table = [[*head, "tokens/round", "compile", "memory"], *map(self._cells, self.strategies)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]).rstrip() for first, *rest in table
        ]
        lines += self._setting()
        lines += [histogram_line(report.accept_histogram) for report in self.strategies if report.drafted]
        for report in self.strategies:
            if report.differences is not None:
                lines += ["", self._agreement(report)]
            if report.strategy == "self_speculative" and self.exit_layer is not None:
                lines += ["", self._verdict(report, self.exit_layer)]
        return "\n".join(lines)

    def _cells(self, report: StrategyReport) -> list[str]:
        speed, used = report.tokens_per_second, report.bandwidth_utilization
        low, high = speed.quartiles
        return [
            report.strategy,
            f"{speed.median:.1f}",
            f"{low:.1f}-{high:.1f}",
            f"{report.speed_up.median:.2f}",
            _duration(report.first_token_seconds.median),
            "-" if report.round_seconds is None else _duration(report.round_seconds.median),
            "-" if used is None else f"{used:.0%}",
            f"{report.acceptance_rate:.1%}" if report.drafted else "-",
            f"{report.tokens_per_round:.2f}",
            f"{report.compile_seconds:.1f} s",
            "-" if report.memory_bytes is None else _gigabytes(report.memory_bytes),
        ]

    def _setting(self) -> list[str]:
        count, shortest, longest = len(self.prompt_lengths), min(self.prompt_lengths), max(self.prompt_lengths)
        size = f"{shortest}" if shortest == longest else f"{shortest} to {longest}"
        wrote = sorted({report.new_tokens for report in self.strategies})
        lines = [
            f"{count} prompt{'s'[: count > 1]} of {size} token{'s'[: longest > 1]}, {min(self.batch_size, count)} at a "
            f"time, at most {self.max_new_tokens} new tokens each ({' or '.join(map(str, wrote))} in all); medians of "
            f"{self.repetitions} run{'s'[: self.repetitions > 1]}",
            f"{self.dtype} weights{', prepared' if self.prepared else ''}, on {self.device}",
        ]
        if self.bandwidth is not None:
            lines[1] += f"; memory was read at up to {self.bandwidth / 1e9:.1f} GB/s"
        for name, peak in (("process", self.host_peak_bytes), ("device", self.device_peak_bytes)):
            if peak is not None:
                lines[1] += f"; peak of the {name}: {_gigabytes(peak)}"
        return [
            *lines,
            "(1st token: prompt and first round; round: one step, or drafts and their check; bandwidth: bytes it",
            "must read over its time, over the fastest reading; memory: weights, cache and temporaries of the program)",
        ]

    def _agreement(self, report: StrategyReport) -> str:
        parted, count = report.differences or (), len(self.prompt_lengths)
        if not parted:
            texts = "The text is" if count == 1 else f"All {count} texts are"
            return f"{texts} the same with {report.strategy} as with {BASELINE}, token for token."
        worse = [one for one in parted if not one.is_tie(self.dtype)]
        first = (worse or list(parted))[0].explain(BASELINE, report.strategy, self.dtype)
        if worse:
            return f"{len(worse)} OF {count} TEXTS DIFFER by more than ties of rounding, first at {first}"
        return f"Of {count} texts, {len(parted)} part at a tie of rounding, first at {first}"

    def _verdict(self, report: StrategyReport, exit_layer: int) -> str:
        return speed_verdict(
            report.speed_up.median,
            drafted=report.drafted,
            acceptance_rate=report.acceptance_rate,
            tokens_per_round=report.tokens_per_round,
            exit_layer=exit_layer,
            num_layers=self.num_layers,
            num_speculations=self.num_speculations,
        )


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
