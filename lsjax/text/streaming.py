"""One text while it is written, and what there is to say of it in the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from lsjax.config import LlamaConfig, token_ids
from lsjax.decode.state import Stats
from lsjax.decode.stopping import NO_TOKEN, stop_array
from lsjax.decode.stream import Stream, StreamBlock
from lsjax.decode.token_scores import TokenScores
from lsjax.text.growing import GrowingText

FinishReason = Literal["eos", "stop", "length"]


@dataclasses.dataclass(frozen=True, eq=False)
class TextResult:
    """What a model wrote after one prompt.

    Attributes:
        text: the new text, without special tokens and, unless it was asked for, without the stop string.
        tokens: int32 ``[count]``, the new tokens, EOS included; with a stop string the shortest beginning whose text
            holds it whole.
        finish_reason: ``"eos"``; ``"stop"``: a stop string, a stop sequence of ids, or the caller; ``"length"``: there
            are as many tokens as were asked for.
        stop: the stop string; None: none ended the text.
        stats: what the rounds did, of this row. A stop string may end a text within a round, whose tokens all count.
        scores: log-probabilities of ``tokens``, ``[count]``; None where they were not asked for.
    """

    text: str
    tokens: np.ndarray
    finish_reason: FinishReason
    stop: str | None
    stats: Stats
    scores: TokenScores | None = None


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """Text that has just been written.

    Attributes:
        runs: its parts, one after another, each with whether accepted drafts wrote it; the rest is the model's own.
    """

    runs: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for text, _ in self.runs)


class Ends:
    """Which ids end a row, for saying why one ended.

    Args:
        config: the model's configuration.
        options: the caller's, of which ``eos_token_id`` and ``stop_sequences`` matter.
    """

    def __init__(self, config: LlamaConfig, options: Mapping[str, Any]) -> None:
        eos, stops = options.get("eos_token_id"), options.get("stop_sequences")
        self._eos = config.eos_token_id if eos is None else token_ids("eos_token_id", eos)
        self._stops, self._vocab_size = stops, config.vocab_size

    def reason(self, tokens: Sequence[int], row: int, batch: int) -> FinishReason:
        """Why a row ended that no stop string ended.

        Args:
            tokens: its new tokens.
            row: which of the batch's it is.
            batch: rows.
        """
        if tokens and tokens[-1] in self._eos:
            return "eos"
        if self._stops is not None:
            for stop in np.asarray(stop_array(self._stops, batch, self._vocab_size))[row]:
                ids = stop[stop != NO_TOKEN].tolist()
                if ids and list(tokens[-len(ids) :]) == ids:
                    return "stop"
        return "length"


class Row:
    """One row of a stream: its text and its scores, block by block."""

    def __init__(self, index: int, text: GrowingText) -> None:
        self.index, self.text = index, text
        self._scores: list[TokenScores] = []

    def read(self, block: StreamBlock) -> bool:
        """Takes in a block; whether a stop string has ended the text."""
        tokens = block.row(self.index).tolist()
        if block.scores is not None and tokens:
            self._scores.append(jax.tree.map(lambda values: values[self.index, : len(tokens)], block.scores))
        drafted = block.drafted[self.index, : len(tokens)].tolist()
        return any(self.text.push(*one) for one in zip(tokens, drafted, strict=True))

    def result(self, finish_reason: FinishReason, stats: Stats) -> TextResult:
        """The row's result, once it has ended."""
        tokens, scores = np.array(self.text.tokens, np.int32), None
        if self._scores:
            scores = jax.tree.map(lambda *parts: np.concatenate(parts)[: len(tokens)], *self._scores)
        return TextResult(self.text.text, tokens, finish_reason, self.text.stop, stats, scores)


class TextStream:
    """An iterator over the pieces of one text, given out as soon as nothing can change them.

    Args:
        blocks: the stream of a single row, none of whose blocks was taken.
        text: what decodes it.
        ends: which ids end it.
    """

    def __init__(self, blocks: Stream, text: GrowingText, ends: Ends) -> None:
        self._blocks, self._row, self._ends = blocks, Row(0, text), ends
        self._before: Stats = jax.device_get(blocks.state.stats)  # of earlier turns
        self._stats = self._before
        self._stopped = False
        self._result: TextResult | None = None

    def __iter__(self) -> Iterator[TextPiece]:
        return self

    def __next__(self) -> TextPiece:
        while self._result is None:
            if self._stopped:
                self._blocks.stop(0)
            block = next(self._blocks, None)
            if block is None:
                self._finish()
            else:
                self._stats = block.stats
                if self._row.read(block):
                    self._blocks.stop(0)
            if runs := self._row.text.take():
                return TextPiece(runs)
        raise StopIteration

    def stop(self) -> None:
        """Ends the text after the round that runs, if any; what was not yet given out is the last piece.

        A signal handler may call it.
        """
        self._stopped = True

    @property
    def result(self) -> TextResult:
        """The whole, once the iterator has ended.

        Raises:
            RuntimeError: it has not.
        """
        if self._result is None:
            raise RuntimeError("result: expected a text that has ended; take all its pieces first, or call stop")
        return self._result

    def _finish(self) -> None:
        text = self._row.text
        text.finish()
        reason = self._ends.reason(text.tokens, 0, 1)
        if text.stop is not None or (self._stopped and reason != "eos"):
            reason = "stop"
        stats = jax.tree.map(lambda after, before: (after - before)[0], self._stats, self._before)
        self._result = self._row.result(reason, stats)
