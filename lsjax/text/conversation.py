"""A chat with a model: each turn reads only what the decode state does not hold already."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from lsjax.checks import check_int
from lsjax.decode.prefill import prefill
from lsjax.decode.request import MAX_NEW_TOKENS
from lsjax.decode.rewind import rewind
from lsjax.decode.state import DecodeState
from lsjax.decode.stream import Stream
from lsjax.text.generator import TextGenerator
from lsjax.text.growing import GrowingText
from lsjax.text.prompts import encode
from lsjax.text.stopping import read_stops
from lsjax.text.streaming import Ends, TextStream


class ConversationFullError(ValueError):
    """The conversation and an answer of one token would not fit into the capacity."""


class Conversation:
    """Turns of a user and the model, kept in one decode state.

    Each turn, the chat template is rendered for the whole conversation. The state keeps the tokens that it has in
    common with that from the left, is rewound to them, and reads the rest: the new message and what the template puts
    around it. Programs are those of the first two turns, and one for each of few widths of what is read.

    Args:
        generator: the model and its tokenizer.
        capacity: tokens that the whole conversation may come to.
        system: a system message in front.
        stop: strings that end an answer, as of :meth:`~lsjax.text.generator.TextGenerator.generate`.
        max_new_tokens: of one answer; less where the capacity leaves less.
        options: the rest of :func:`~lsjax.decode.prefill.prefill`'s.

    Attributes:
        kept: of the last turn, tokens that were not read again.
        read: of the last turn, tokens that were read.

    Raises:
        ValueError: an option's value; a tokenizer without a chat template.
    """

    def __init__(
        self,
        generator: TextGenerator,
        *,
        capacity: int,
        system: str | None = None,
        stop: Any = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        **options: Any,
    ) -> None:
        self._generator = generator
        self._stops = read_stops(stop, generator.tokenizer)
        self._new = check_int("max_new_tokens", max_new_tokens, 1)
        self._options = {"capacity": check_int("capacity", capacity, 2), **options}
        self._ends = Ends(generator.params.config, options)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._encode([{"role": "user", "content": "?"}])  # whether the template takes such messages
        self.reset()

    @property
    def capacity(self) -> int:
        """Tokens that the whole conversation may come to."""
        return self._options["capacity"]

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said so far, ``{"role": ..., "content": ...}``; an answer that has not ended is ended."""
        self._settle()
        return [*self._system, *self._said]

    @property
    def length(self) -> int:
        """Tokens of the conversation so far, the last answer's included."""
        self._settle()
        return len(self._held)

    def reset(self) -> None:
        """Forgets all that was said but the system message."""
        self._said: list[dict[str, str]] = []
        self._state: DecodeState | None = None
        self._held: list[int] = []  # the state's tokens
        self._turn: tuple[Stream, TextStream] | None = None
        self.kept = self.read = 0

    def ask(self, text: str) -> TextStream:
        """Says something.

        Args:
            text: the user's message.

        Returns:
            the answer's pieces. Once they were taken, or the answer was ended by its ``stop`` or by the next turn, its
            text is part of the conversation.

        Raises:
            ConversationFullError: there is no room; the conversation stays as it was.
        """
        self._settle()
        said = [*self._said, {"role": "user", "content": text}]
        tokens = self._encode(said)
        room = self.capacity - len(tokens)
        if room < 1:
            raise ConversationFullError(
                f"the conversation is full: with this message it has {len(tokens)} tokens, and {self.capacity} is its "
                "capacity, answer included"
            )
        state = self._read(tokens, min(self._new, room))
        stream = Stream(self._generator.params, state)
        answer = TextStream(stream, GrowingText(self._generator.tokenizer, tokens, self._stops), self._ends)
        self._said, self._turn = said, (stream, answer)
        return answer

    def _read(self, tokens: list[int], new: int) -> DecodeState:
        params, state = self._generator.params, self._state
        self._state = None  # its cache goes into the next round
        # At least one token is read, so that the model has something to answer.
        kept = min(_common(self._held, tokens), len(tokens) - 1)
        if state is None or kept < 1:
            self.kept, self.read = 0, len(tokens)
            return prefill(params, [tokens], max_new_tokens=new, **self._options)
        self.kept, self.read = kept, len(tokens) - kept
        return prefill(params, [tokens[kept:]], state=rewind(state, kept), max_new_tokens=new)

    def _settle(self) -> None:
        """Takes the last answer into the conversation."""
        if self._turn is None:
            return
        (stream, answer), self._turn = self._turn, None
        answer.stop()
        for _ in answer:
            pass
        self._said.append({"role": "assistant", "content": answer.result.text})
        self._state = stream.state
        held, length = jax.device_get((self._state.tokens, self._state.lengths))
        self._held = held[0, : int(length[0])].tolist()

    def _encode(self, said: list[dict[str, str]]) -> list[int]:
        return encode([*self._system, *said], self._generator.tokenizer).tolist()


def _common(left: list[int], right: list[int]) -> int:
    """How many tokens two texts have in common from the left."""
    size = min(len(left), len(right))
    different = np.flatnonzero(np.array(left[:size]) != np.array(right[:size]))
    return int(different[0]) if different.size else size
