"""``lsjax generate --compare``: the same prompts autoregressively and self-speculatively, timed side by side."""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import numpy as np

from lsjax.cli.session import Answer, Session, note
from lsjax.measure.difference import Difference, differences
from lsjax.measure.timing import time_in_turns
from lsjax.measure.verdict import histogram_line, speed_verdict

_STRATEGIES = ("autoregressive", "self_speculative")


class Timed(NamedTuple):
    """One strategy's answer, the median seconds of its warm runs, and what its first run took longer."""

    answer: Answer
    seconds: float
    compile_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all prompts, the prompts' own passes included in the time."""
        return self.answer.new_tokens / self.seconds


class Comparison(NamedTuple):
    """Both strategies, how many times as fast the second was, and where their texts first part."""

    plain: Timed
    drafted: Timed
    speed_ratio: float
    difference: Difference | None


def run(session: Session) -> int:
    """Runs and reports the comparison: status 0 where all tokens agree, 1 where they differ."""
    found = _compare(session)
    if session.options.json:
        print(json.dumps(_report(session, found), ensure_ascii=False))
    else:
        _show(session, found)
    return 0 if found.difference is None else 1


def _compare(session: Session) -> Comparison:
    def tell(strategy: str, repetition: int) -> None:
        if strategy == _STRATEGIES[0]:
            timing = f"timing: {repetition} of {session.options.repetitions}"
            note(timing if repetition else "compiling: both strategies")

    calls = {strategy: functools.partial(session.answer, strategy) for strategy in _STRATEGIES}
    timings = time_in_turns(calls, repetitions=session.options.repetitions, progress=tell)
    plain, drafted = (
        Timed(timing.result, timing.median, timing.compile_seconds) for timing in (timings[name] for name in calls)
    )
    ratio = timings.ratio(*_STRATEGIES).median * drafted.answer.new_tokens / plain.answer.new_tokens
    return Comparison(plain, drafted, ratio, _first_difference(session, plain.answer, drafted.answer))


def _first_difference(session: Session, plain: Answer, drafted: Answer) -> Difference | None:
    row = next((i for i, (left, right) in enumerate(zip(plain.rows, drafted.rows, strict=True)) if left != right), None)
    if row is None:
        return None
    prompt = session.prompts.tokens[row, : session.prompts.lengths[row]]
    (found,) = differences(session.params, [prompt], [plain.rows[row]], [drafted.rows[row]])
    return found._replace(row=row)


def _report(session: Session, found: Comparison) -> dict[str, Any]:
    """The comparison for JSON."""
    strategies = {
        timed.answer.strategy: timed.answer.summary()
        | {
            "seconds": timed.seconds,
            "compile_seconds": timed.compile_seconds,
            "tokens_per_second": timed.tokens_per_second,
            "results": session.results(timed.answer),
        }
        for timed in (found.plain, found.drafted)
    }
    difference = found.difference
    return session.describe() | {
        "identical": difference is None,
        "first_difference": None if difference is None else difference.to_dict(*_STRATEGIES, session.params.dtype),
        "speed_ratio": found.speed_ratio,
        "strategies": strategies,
    }


def _show(session: Session, found: Comparison) -> None:
    if found.difference is None:
        session.show(found.plain.answer)
        print("\nBoth strategies wrote this text, identical token for token.\n")
    else:
        for timed in (found.plain, found.drafted):
            print(f"---- {timed.answer.strategy}")
            session.show(timed.answer)
        where = found.difference.explain(*_STRATEGIES, session.params.dtype, session.tokenizer.decode)
        print(f"\nTHE TEXTS DIFFER: first at {where}\n")
    _print_table(session, found)
    answer, options = found.drafted.answer, session.options
    verdict = speed_verdict(
        found.speed_ratio,
        drafted=sum(answer.drafted),
        acceptance_rate=answer.acceptance_rate,
        tokens_per_round=answer.tokens_per_round,
        exit_layer=options.exit_layer,
        num_layers=session.params.config.num_hidden_layers,
        num_speculations=options.num_speculations,
    )
    print(f"\n{verdict}")


def _print_table(session: Session, found: Comparison) -> None:
    runs = session.options.repetitions
    print(f"{'strategy':<16}  new tokens  seconds  tokens/s  compile s  accepted  tokens/round")
    for timed in (found.plain, found.drafted):
        answer = timed.answer
        accepted = f"{answer.acceptance_rate:.1%}" if sum(answer.drafted) else "-"
        print(
            f"{answer.strategy:<16}  {answer.new_tokens:>10}  {timed.seconds:>7.2f}  {timed.tokens_per_second:>8.1f}  "
            f"{timed.compile_seconds:>9.1f}  {accepted:>8}  {answer.tokens_per_round:>12.2f}"
        )
    print(f"(seconds: median of {runs} warm run{'s'[: runs > 1]}, the prompt's pass included; {session.params.dtype})")
    print(histogram_line(np.sum(found.drafted.answer.accept_histogram, axis=0).tolist()))
