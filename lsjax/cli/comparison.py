"""``lsjax generate --compare``: the same prompts autoregressively and self-speculatively, timed side by side."""

from __future__ import annotations

import json
import statistics
from typing import Any, NamedTuple

import numpy as np

from lsjax.cli.session import Answer, Session, note
from lsjax.params import forward

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


class Difference(NamedTuple):
    """The first new token at which two answers disagree; an id is None where a text had ended."""

    prompt: int
    new_token: int
    autoregressive: int | None
    self_speculative: int | None
    gap: float  # between the full model's two best logits there, in standard deviations of its logits


def run(session: Session) -> int:
    """Runs and reports the comparison: status 0 where all tokens agree, 1 where they differ."""
    plain, drafted = _time(session)
    difference = _first_difference(session, plain.answer, drafted.answer)
    if session.options.json:
        print(json.dumps(_report(session, plain, drafted, difference), ensure_ascii=False))
    else:
        _show(session, plain, drafted, difference)
    return 0 if difference is None else 1


def _time(session: Session) -> list[Timed]:
    """One run of each that compiles, then warm runs in turns, so that a slow moment of the machine meets both."""
    note("compiling: both strategies")
    first = {strategy: session.answer(strategy) for strategy in _STRATEGIES}
    seconds: dict[str, list[float]] = {strategy: [] for strategy in _STRATEGIES}
    for repetition in range(session.options.repetitions):
        note(f"timing: {repetition + 1} of {session.options.repetitions}")
        for strategy in _STRATEGIES:
            seconds[strategy].append(session.answer(strategy).seconds)
    medians = {strategy: statistics.median(seconds[strategy]) for strategy in _STRATEGIES}
    return [
        Timed(first[strategy], medians[strategy], max(first[strategy].seconds - medians[strategy], 0.0))
        for strategy in _STRATEGIES
    ]


def _first_difference(session: Session, plain: Answer, drafted: Answer) -> Difference | None:
    for prompt, (left, right) in enumerate(zip(plain.rows, drafted.rows, strict=True)):
        if left != right:
            pairs = enumerate(zip(left, right, strict=False))
            at = next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
            plain_id, drafted_id = (row[at] if at < len(row) else None for row in (left, right))
            return Difference(prompt, at, plain_id, drafted_id, _gap(session, prompt, left[:at]))
    return None


def _gap(session: Session, prompt: int, new: list[int]) -> float:
    given = session.prompts.tokens[prompt, : session.prompts.lengths[prompt]]
    logits = np.asarray(forward(session.params, np.concatenate([given, np.array(new, np.int32)])))[-1]
    second, best = np.sort(logits)[-2:]
    return float((best - second) / logits.std())


def _report(session: Session, plain: Timed, drafted: Timed, difference: Difference | None) -> dict[str, Any]:
    """The comparison for JSON."""
    strategies = {
        timed.answer.strategy: timed.answer.summary()
        | {
            "seconds": timed.seconds,
            "compile_seconds": timed.compile_seconds,
            "tokens_per_second": timed.tokens_per_second,
            "results": session.results(timed.answer),
        }
        for timed in (plain, drafted)
    }
    return session.describe() | {
        "identical": difference is None,
        "first_difference": None if difference is None else difference._asdict(),
        "speed_ratio": drafted.tokens_per_second / plain.tokens_per_second,
        "strategies": strategies,
    }


def _show(session: Session, plain: Timed, drafted: Timed, difference: Difference | None) -> None:
    if difference is None:
        session.show(plain.answer)
        print("\nBoth strategies wrote this text, identical token for token.\n")
    else:
        for timed in (plain, drafted):
            print(f"---- {timed.answer.strategy}")
            session.show(timed.answer)
        print(f"\nTHE TEXTS DIFFER: {_explain(session, difference)}\n")
    _print_table(session, (plain, drafted))
    print(f"\n{_verdict(session, plain, drafted)}")


def _explain(session: Session, difference: Difference) -> str:
    def name(token: int | None) -> str:
        return "the end" if token is None else f"{session.tokenizer.decode([token])!r} (id {token})"

    return (
        f"first at new token {difference.new_token + 1} of prompt {difference.prompt + 1}: autoregressive "
        f"{name(difference.autoregressive)}, self_speculative {name(difference.self_speculative)}. The full model's "
        f"two best logits there are {difference.gap:.1e} of the logits' standard deviation apart (in float32, less "
        "than 1e-04 is a tie that rounding decides; bfloat16 and float16 round far more coarsely)."
    )


def _print_table(session: Session, rows: tuple[Timed, ...]) -> None:
    runs = session.options.repetitions
    print(f"{'strategy':<16}  new tokens  seconds  tokens/s  compile s  accepted  tokens/round")
    for timed in rows:
        answer = timed.answer
        accepted = f"{answer.acceptance_rate:.1%}" if sum(answer.drafted) else "-"
        print(
            f"{answer.strategy:<16}  {answer.new_tokens:>10}  {timed.seconds:>7.2f}  {timed.tokens_per_second:>8.1f}  "
            f"{timed.compile_seconds:>9.1f}  {accepted:>8}  {answer.tokens_per_round:>12.2f}"
        )
    print(f"(seconds: median of {runs} warm run{'s'[: runs > 1]}, the prompt's pass included; {session.params.dtype})")
    counts = np.sum(rows[-1].answer.accept_histogram, axis=0).tolist()
    print("rounds by accepted drafts: " + ", ".join(f"{kept}: {count}" for kept, count in enumerate(counts)))


def _verdict(session: Session, plain: Timed, drafted: Timed) -> str:
    ratio = drafted.tokens_per_second / plain.tokens_per_second
    options, layers = session.options, session.params.config.num_hidden_layers
    text = f"Self-speculative decoding ran at {ratio:.2f} times the speed of autoregressive decoding."
    if ratio >= 1:
        return text
    answer = drafted.answer
    if not sum(answer.drafted):
        return f"{text} Nothing was drafted, so it could gain nothing."
    text += (
        f" It was slower because {answer.acceptance_rate:.1%} of the drafts were accepted, "
        f"{answer.tokens_per_round:.2f} tokens a round: too few to pay for rounds of {options.num_speculations} drafts "
        f"by {options.exit_layer} of {layers} layers, and their check."
    )
    if answer.acceptance_rate < 0.5:
        text += (
            " Layers draft well only if the model was trained to exit early, as LayerSkip checkpoints are; this "
            "model's first layers seldom name the token that the whole model picks."
        )
    return text
