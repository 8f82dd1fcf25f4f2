"""The text of one row while it is written: decoded, ended by stop strings, and given out when nothing can change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lsjax.text.detokenizer import Detokenizer
from lsjax.text.stopping import StopStrings


class GrowingText:
    """One row's new tokens as text.

    The text ends before the first stop string in it: before the one that is whole first, as tokens come, and of several
    that one token completes, before the one that begins earliest. Tokens end with the one that makes it whole, so they
    are the shortest beginning of the row whose text holds a stop string.

    Args:
        tokenizer: a tokenizer of transformers.
        context: ids before the first new token; their text is no part of this one, nor of a stop string.
        stops: what ends the text.
        include_stop: whether the text ends behind the stop string instead.

    Attributes:
        tokens: ids so far.
        text: the text so far, as far as its characters are complete; without the stop string that ended it.
        stop: the stop string that ended the text; None: none did.
    """

    def __init__(
        self,
        tokenizer: Any,
        context: Sequence[int] = (),
        stops: StopStrings | None = None,
        *,
        include_stop: bool = False,
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.stop: str | None = None
        self._detokenizer = Detokenizer(tokenizer, context)
        self._stops = StopStrings() if stops is None else stops
        self._include_stop = include_stop
        self._drafted: list[bool] = []  # of each character
        self._last_drafted = False
        self._taken = 0  # characters given out
        self._finished = False

    def push(self, token: int, drafted: bool = False) -> bool:
        """Adds a token.

        Args:
            token: its id.
            drafted: whether it was an accepted draft; characters that it completes count as drafted.

        Returns:
            whether the text has ended; a token that comes after its end changes nothing.
        """
        if not self._finished:
            self.tokens.append(int(token))
            self._last_drafted = bool(drafted)
            self._add(self._detokenizer.push(token))
        return self._finished

    def finish(self) -> None:
        """Ends the text where it is: no more tokens come."""
        if not self._finished:
            self._add(self._detokenizer.finish())
            self._finished = True

    def take(self) -> tuple[tuple[str, bool], ...]:
        """What can be given out and was not yet: runs of text, and whether accepted drafts wrote them.

        What may be the beginning of a stop string waits until it is one, or is none.
        """
        end = len(self.text) - (0 if self._finished else self._stops.held(self.text))
        runs: list[tuple[str, bool]] = []
        while self._taken < end:
            start, drafted = self._taken, self._drafted[self._taken]
            while self._taken < end and self._drafted[self._taken] == drafted:
                self._taken += 1
            runs.append((self.text[start : self._taken], drafted))
        return tuple(runs)

    def _add(self, new: str) -> None:
        begin = max(len(self.text) - self._stops.longest + 1, 0)
        self.text += new
        self._drafted += [self._last_drafted] * len(new)
        found = self._stops.find(self.text, begin) if new else None
        if found is not None:
            self.stop, self._finished = found.stop, True
            self.text = self.text[: found.end if self._include_stop else found.start]
