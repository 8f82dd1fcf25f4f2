"""What one call of ``lsjax generate`` works with: the model, the encoded prompts, and runs of them."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lsjax.checks import check_depth, check_tokens
from lsjax.cli.parser import UsageError, usage_errors
from lsjax.cli.signals import handled
from lsjax.cli.text_options import check_stops, drawing, drawing_options
from lsjax.config import LlamaConfig
from lsjax.decode.generate import generate
from lsjax.io import load
from lsjax.params import Params
from lsjax.text.generator import TextGenerator
from lsjax.text.prompts import encode, pad_rows
from lsjax.text.streaming import TextResult
from lsjax.text.tokenizer import load_tokenizer


class Prompts(NamedTuple):
    """A batch of prompts: int32 ``[batch, width]`` padded on the right, int32 ``[batch]``."""

    texts: list[str]
    tokens: np.ndarray
    lengths: np.ndarray


@dataclasses.dataclass(frozen=True)
class Answer:
    """One run's output and statistics on the host, each list one entry a prompt.

    ``rows`` holds the new tokens; ``texts`` theirs and ``finish_reasons`` why they ended, where these are known.
    """

    strategy: str
    seconds: float
    rows: list[list[int]]
    rounds: list[int]
    drafted: list[int]
    accepted: list[int]
    accept_histogram: list[list[int]]
    texts: list[str] | None = None
    finish_reasons: list[str] | None = None

    @classmethod
    def of_results(cls, strategy: str, seconds: float, results: Sequence[TextResult]) -> Answer:
        """What a generator wrote after some prompts."""
        names = ("rounds", "drafted", "accepted", "accept_histogram")
        return cls(
            strategy=strategy,
            seconds=seconds,
            rows=[result.tokens.tolist() for result in results],
            texts=[result.text for result in results],
            finish_reasons=[result.finish_reason for result in results],
            **{name: [np.asarray(getattr(result.stats, name)).tolist() for result in results] for name in names},
        )

    @property
    def new_tokens(self) -> int:
        """New tokens of all prompts."""
        return sum(map(len, self.rows))

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts of all drafts, 0 where nothing was drafted."""
        return sum(self.accepted) / max(sum(self.drafted), 1)

    @property
    def tokens_per_round(self) -> float:
        """New tokens a round and prompt."""
        return self.new_tokens / max(sum(self.rounds), 1)

    def line(self, *, compiled: bool = True) -> str:
        """The numbers over all prompts, in a line; whether to say that the time holds that of compilation."""
        drafts = f", {self.acceptance_rate:.1%} of the drafts accepted" if sum(self.drafted) else ""
        return (
            f"{self.strategy}: {self.new_tokens} new tokens in {self.seconds:.2f} s{' with compilation' * compiled}, "
            f"{self.tokens_per_round:.2f} tokens a round{drafts}"
        )

    def summary(self) -> dict[str, Any]:
        """The numbers over all prompts, for JSON."""
        names = ("new_tokens", "acceptance_rate", "tokens_per_round")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Session:
    """What every run of one call shares."""

    params: Params
    tokenizer: Any  # a tokenizer of transformers
    prompts: Prompts
    options: argparse.Namespace

    @property
    def generator(self) -> TextGenerator:
        """The model with its tokenizer."""
        return TextGenerator(self.params, self.tokenizer)

    def decoding(self, strategy: str) -> dict[str, Any]:
        """What ``lsjax.generate`` is to do."""
        return {
            "exit_layer": self.options.exit_layer,
            "num_speculations": self.options.num_speculations,
            "max_new_tokens": self.options.max_new_tokens,
            "strategy": strategy,
            **drawing(self.options),
        }

    def write(self, strategy: str) -> Answer:
        """Texts of one strategy, up to the stop strings."""
        start = time.perf_counter()
        with interruptible():
            results = self.generator.generate(
                self.prompts.texts, chat=self.options.chat, stop=self.options.stop, **self.decoding(strategy)
            )
        return Answer.of_results(strategy, time.perf_counter() - start, results)

    def answer(self, strategy: str) -> Answer:
        """Generates with one strategy and waits for the result: tokens alone, to be timed."""
        start = time.perf_counter()
        with interruptible():
            found = generate(
                self.params,
                self.prompts.tokens,
                prompt_lengths=self.prompts.lengths,
                **self.decoding(strategy),
            )
            tokens = np.asarray(found.tokens)  # waits
        seconds = time.perf_counter() - start
        spans = zip(tokens, self.prompts.lengths, np.asarray(found.lengths), strict=True)
        return Answer(
            strategy=strategy,
            seconds=seconds,
            rows=[row[begin:end].tolist() for row, begin, end in spans],
            rounds=np.asarray(found.stats.rounds).tolist(),
            drafted=np.asarray(found.stats.drafted).tolist(),
            accepted=np.asarray(found.stats.accepted).tolist(),
            accept_histogram=np.asarray(found.stats.accept_histogram).tolist(),
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Generated ids as text, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def texts(self, answer: Answer) -> list[str]:
        """An answer's texts."""
        return [self.decode(row) for row in answer.rows] if answer.texts is None else answer.texts

    def head(self, index: int) -> None:
        """Prints a text's prompt above it where there are several."""
        if len(self.prompts.texts) > 1:
            print(f"== prompt {index + 1}: {' '.join(self.prompts.texts[index].split())[:80]}")

    def show(self, answer: Answer) -> None:
        """Prints the generated texts, under their prompts where there are several."""
        for index, text in enumerate(self.texts(answer)):
            self.head(index)
            print(text)

    def describe(self) -> dict[str, Any]:
        """What was asked for, for JSON."""
        return {
            "model": self.options.model,
            "dtype": str(self.params.dtype),
            "num_layers": self.params.config.num_hidden_layers,
            "exit_layer": self.options.exit_layer,
            "num_speculations": self.options.num_speculations,
            "max_new_tokens": self.options.max_new_tokens,
            **drawing_options(self.options),
            **({"stop": self.options.stop} if self.options.stop else {}),
        }

    def results(self, answer: Answer) -> list[dict[str, Any]]:
        """An answer for JSON, one object a prompt."""
        return [
            {
                "prompt": self.prompts.texts[index],
                "text": text,
                "tokens": answer.rows[index],
                **({"finish_reason": answer.finish_reasons[index]} if answer.finish_reasons else {}),
                "rounds": answer.rounds[index],
                "drafted": answer.drafted[index],
                "accepted": answer.accepted[index],
                "accept_histogram": answer.accept_histogram[index],
            }
            for index, text in enumerate(self.texts(answer))
        ]


def open_session(options: argparse.Namespace) -> Session:
    """Loads the model and encodes the prompts.

    Raises:
        UsageError: the model does not load, or an option does not fit it.
    """
    note(f"loading {options.model}")
    with usage_errors(f"--model {options.model}", ValueError, OSError, ImportError):
        tokenizer = load_tokenizer(options.model)  # first, since it is quick to fail
        params = load(options.model, dtype=options.dtype)
    if options.exit_layer is not None:
        with usage_errors(f"--exit-layer {options.exit_layer}", ValueError):
            check_depth(options.model, options.exit_layer, params.config)
    check_stops(options, tokenizer)
    rows = []
    for text in options.prompt:
        with usage_errors("--chat" if options.chat else "--prompt", ValueError):
            rows.append(encode(text, tokenizer, chat=options.chat))
            check_tokens(rows[-1], params.config)
    return Session(params, tokenizer, Prompts(options.prompt, *pad_rows(rows)), options)


def encode_prompts(source: str, prompts: Sequence[str | list[int]], *, chat: bool = False) -> list[Any]:
    """Texts and lists of ids as rows of ids; the tokenizer is loaded only for texts.

    Args:
        source: the model, as ``lsjax.load`` takes it.
        prompts: texts, and rows that are ids already.
        chat: put texts into the model's chat template.

    Raises:
        UsageError: a chat template for ids, or texts for a model without a tokenizer.
        as :func:`~lsjax.text.tokenizer.load_tokenizer` and :func:`~lsjax.text.prompts.encode`.
    """
    if chat and not all(isinstance(prompt, str) for prompt in prompts):
        raise UsageError('--chat is for texts: --prompts holds {"tokens": ...}')
    tokenizer = None
    if any(isinstance(prompt, str) for prompt in prompts):
        try:
            tokenizer = load_tokenizer(source)
        except FileNotFoundError as error:
            if "holds no tokenizer" not in str(error):
                raise
            hint = 'give ids, --prompts FILE.jsonl with lines {"tokens": [1, 2, 3]}'
            raise UsageError(f"{error}; {hint}") from error
    return [encode(item, tokenizer, chat=chat) if isinstance(item, str) else item for item in prompts]


def long_capacity(config: LlamaConfig, longest: int) -> int | None:
    """The capacity for prompts on both sides of longrope's original length: all with the long factors; or None.

    Args:
        config: the model's configuration.
        longest: tokens that the longest text may come to.
    """
    boundary = config.short_length
    return longest if boundary is not None and longest > boundary else None


def run(session: Session) -> int:
    """Answers with the strategy that was asked for: the text on stdout, statistics on stderr."""
    strategy = session.options.strategy
    note("compiling and generating")
    answer = session.write(strategy)
    if session.options.json:
        report = session.describe() | {"strategy": strategy, "seconds": answer.seconds} | answer.summary()
        print(json.dumps(report | {"results": session.results(answer)}, ensure_ascii=False))
        return 0
    session.show(answer)
    print(answer.line(), file=sys.stderr)
    return 0


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Lets Ctrl-C end the process at once (status 130 to a shell), quietly.

    Python's own handler would run only when the compiled program returns, perhaps minutes later.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    with handled(signal.SIG_DFL, signal.SIGINT):
        yield


def note(text: str) -> None:
    """Tells a person at a terminal what is going on."""
    if sys.stderr.isatty():
        print(f"{text} ...", file=sys.stderr, flush=True)
