"""Texts in, texts out: a model with its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import jax
import numpy as np

from lsjax.checks import check_params
from lsjax.decode.generate import generate
from lsjax.decode.request import MAX_NEW_TOKENS
from lsjax.decode.stream import stream
from lsjax.params import Model
from lsjax.prepared import prepare
from lsjax.sources import read_params
from lsjax.text.growing import GrowingText
from lsjax.text.prompts import encode, pad_rows
from lsjax.text.stopping import read_stops
from lsjax.text.streaming import Ends, Row, TextResult, TextStream
from lsjax.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = Sequence[Mapping[str, Any]]
_OWN_OPTIONS = ("prompt_lengths", "attention_mask", "state")


class TextGenerator:
    """A model with its tokenizer.

    Args:
        params: the model; :func:`~lsjax.prepared.prepare` makes it faster.
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, params: Model, tokenizer: PreTrainedTokenizerBase) -> None:
        check_params(params)
        self.params, self.tokenizer = params, tokenizer

    @classmethod
    def from_pretrained(
        cls,
        source: str | os.PathLike[str],
        dtype: Any = None,
        *,
        revision: str | None = None,
        progress: bool | None = None,
    ) -> TextGenerator:
        """Loads a model, prepared for decoding, and its tokenizer.

        Args:
            source: a directory, a ``.gguf`` file, a hub id or ``"demo"``, as of ``lsjax.load``.
            dtype: as of ``lsjax.load``, like the rest.
            revision: of a hub id.
            progress: whether to show it.

        Raises:
            as ``lsjax.load`` and :func:`~lsjax.text.tokenizer.load_tokenizer`.

        Example:
            >>> generator = lsjax.TextGenerator.from_pretrained("facebook/layerskip-llama3.2-1B", "bfloat16")
        """
        tokenizer = load_tokenizer(source, revision=revision, progress=progress)  # first, since it is quick to fail
        params = read_params(source, dtype, revision=revision, progress=progress)
        return cls(prepare(params, donate=True), tokenizer)

    @overload  # a str is a sequence of strings too, but the first that fits counts
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, prompts: str | Chat, **options: Any
    ) -> TextResult: ...

    @overload
    def generate(self, prompts: Sequence[str | Chat], **options: Any) -> list[TextResult]: ...

    def generate(
        self,
        prompts: str | Chat | Sequence[str | Chat],
        *,
        stop: str | Sequence[str] | None = None,
        include_stop: bool = False,
        chat: bool = False,
        **options: Any,
    ) -> TextResult | list[TextResult]:
        """Continues prompts, all in one batch; each result is what its prompt alone gives.

        A stop string ends a text wherever it falls: over tokens, over rounds, or within a token, which is then the
        last one. Of several the one ends it that is whole first, and of those that one token makes whole the one that
        begins earliest. Prompts are not looked at.

        Args:
            prompts: a text; a chat, which is a list of messages ``{"role": ..., "content": ...}``; or a list of texts
                and chats.
            stop: a string or several that end a text.
            include_stop: whether a text ends behind its stop string instead of before it.
            chat: put texts into the tokenizer's chat template, as a user's turn. (Chats always go through it.)
            options: those of :func:`~lsjax.decode.generate.generate`: ``exit_layer``, ``max_new_tokens``, ``key`` and
                so on. With stop strings the rounds are driven from the host.

        Returns:
            a :class:`TextResult` for one prompt, a list of them for a list.

        Raises:
            ValueError: says what was expected and what came.

        Example:
            >>> generator.generate("The capital of France is", stop=".", exit_layer=4).text
        """
        given, single = _read_prompts(prompts)
        stops = read_stops(stop, self.tokenizer)
        rows = self._encode(given, chat)
        texts = [GrowingText(self.tokenizer, row.tolist(), stops, include_stop=include_stop) for row in rows]
        ends = _read_options(self.params, options)
        results = (
            self._until_stops(rows, texts, ends, options) if stops.stops else self._all(rows, texts, ends, options)
        )
        return results[0] if single else results

    def stream(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        *,
        stop: str | Sequence[str] | None = None,
        include_stop: bool = False,
        chat: bool = False,
        **options: Any,
    ) -> TextStream:
        """Continues one prompt and hands over the text as it is written.

        No piece is ever taken back: characters of several tokens come whole, and what may be the beginning of a stop
        string waits.

        Args:
            prompt: a text, or a chat, as of :meth:`generate`, like the rest.
            stop: a string or several.
            include_stop: whether to end behind it.
            chat: whether to put a text into the chat template.
            options: those of :func:`~lsjax.decode.prefill.prefill`.

        Returns:
            an iterator over :class:`TextPiece`, whose ``result`` is what :meth:`generate` returns.

        Raises:
            ValueError: says what was expected and what came.

        Example:
            >>> for piece in generator.stream("Once upon a time", exit_layer=4):
            ...     print(piece.text, end="", flush=True)
        """
        given, single = _read_prompts(prompt)
        if not single:
            raise ValueError(f"prompt: expected one text or chat, got a list of {len(given)}")
        stops = read_stops(stop, self.tokenizer)
        (row,) = self._encode(given, chat)
        ends = _read_options(self.params, options)
        text = GrowingText(self.tokenizer, row.tolist(), stops, include_stop=include_stop)
        return TextStream(stream(self.params, row[None], **options), text, ends)

    def _encode(self, prompts: list[Any], chat: bool) -> list[np.ndarray]:
        rows = [encode(prompt, self.tokenizer, chat=chat) for prompt in prompts]
        for index, row in enumerate(rows):
            if not len(row):
                raise ValueError(f"prompts: expected at least one token each, got {prompts[index]!r} (number {index})")
        return rows

    def _all(self, rows: list[Any], texts: list[GrowingText], ends: Ends, options: dict[str, Any]) -> list[TextResult]:
        """Without stop strings: one compiled loop."""
        tokens, lengths = pad_rows(rows)
        out = jax.device_get(generate(self.params, tokens, prompt_lengths=lengths, **options))
        results = []
        for row, text in enumerate(texts):
            span = slice(int(lengths[row]), int(out.lengths[row]))
            for token in out.tokens[row, span].tolist():
                text.push(token)
            text.finish()
            stats, scores = (jax.tree.map(lambda leaf, row=row: leaf[row], part) for part in (out.stats, out.scores))
            scores = jax.tree.map(lambda leaf, span=span: leaf[span], scores)
            reason = ends.reason(text.tokens, row, len(rows))
            results.append(TextResult(text.text, np.array(text.tokens, np.int32), reason, None, stats, scores))
        return results

    def _until_stops(
        self, rows: list[Any], texts: list[GrowingText], ends: Ends, options: dict[str, Any]
    ) -> list[TextResult]:
        """With stop strings: round by round, and a row gets no more once its text has ended."""
        tokens, lengths = pad_rows(rows)
        blocks = stream(self.params, tokens, prompt_lengths=lengths, **options)
        written = [Row(index, text) for index, text in enumerate(texts)]
        stats: Any = None
        for block in blocks:
            blocks.stop([row.index for row in written if row.read(block)])
            stats = block.stats
        results = []
        for row in written:
            row.text.finish()
            reason = ends.reason(row.text.tokens, row.index, len(rows)) if row.text.stop is None else "stop"
            results.append(row.result(reason, jax.tree.map(lambda leaf, row=row: leaf[row.index], stats)))
        return results


def _read_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """Texts and chats, and whether a single one was given."""
    if isinstance(prompts, str):
        return [prompts], True
    if isinstance(prompts, Sequence) and prompts:
        if all(isinstance(one, Mapping) for one in prompts):
            return [prompts], True
        chats = [one for one in prompts if not isinstance(one, str)]
        if all(isinstance(one, Sequence) and all(isinstance(part, Mapping) for part in one) for one in chats):
            return list(prompts), False
    raise ValueError(
        "prompts: expected a text, a chat of messages {'role': ..., 'content': ...}, or a list of texts and chats; "
        f"got {prompts!r}"
    )


def _read_options(params: Model, options: dict[str, Any]) -> Ends:
    """Checks options that are passed on, and gives both ways of decoding the same defaults."""
    for name in _OWN_OPTIONS:
        if name in options:
            raise ValueError(f"{name}: prompts are encoded and padded here, so it has no meaning: leave it out")
    options.setdefault("max_new_tokens", MAX_NEW_TOKENS)
    return Ends(params.config, options)
