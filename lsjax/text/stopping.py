"""Texts that end a text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from lsjax.checks import check_text


class Match(NamedTuple):
    """Where a stop string stands in a text: ``text[start:end] == stop``."""

    start: int
    end: int
    stop: str


class StopStrings:
    """Stop strings, looked for in a text that grows.

    Args:
        stops: non-empty strings; none of them: nothing is ever found.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self.stops = tuple(dict.fromkeys(stops))

    def find(self, text: str, start: int = 0) -> Match | None:
        """The stop string that begins earliest, and of those that begin there the longest.

        Args:
            text: where to look.
            start: the place from which a stop string may begin.
        """
        found = [(text.find(stop, start), stop) for stop in self.stops]
        at, stop = min(
            ((at, stop) for at, stop in found if at >= 0), key=lambda one: (one[0], -len(one[1])), default=(0, "")
        )
        return Match(at, at + len(stop), stop) if stop else None

    def held(self, text: str) -> int:
        """How many characters at the end of a text may be the beginning of a stop string."""
        longest = 0
        for stop in self.stops:
            sizes = range(min(len(stop) - 1, len(text)), longest, -1)
            longest = next((size for size in sizes if text.endswith(stop[:size])), longest)
        return longest

    @property
    def longest(self) -> int:
        """Characters of the longest stop string, 0 where there are none."""
        return max(map(len, self.stops), default=0)


def read_stops(stop: Any, tokenizer: Any) -> StopStrings:
    """A caller's stop strings: a string, several, or None.

    Args:
        stop: what the caller gave.
        tokenizer: the tokenizer that makes the text.

    Raises:
        ValueError: something that is no string, empty, or with lone surrogates; a special token, which texts never
            hold.
    """
    given = [] if stop is None else [stop] if isinstance(stop, str) else stop
    expected = "stop: expected a string, or several of them,"
    if not isinstance(given, Iterable):
        raise ValueError(f"{expected} got {stop!r}")
    given = list(given)
    for one in given:
        if not isinstance(one, str):
            raise ValueError(f"{expected} got {one!r} among them" if one is not stop else f"{expected} got {stop!r}")
        if not one:
            raise ValueError("stop: expected at least one character, got an empty string")
        check_text("stop", one)
        if one in tokenizer.all_special_tokens:
            ids = tokenizer.convert_tokens_to_ids(one)
            raise ValueError(
                f"stop: expected a text, got the special token {one!r}, which texts never hold: end at its id instead, "
                f"eos_token_id={ids}"
            )
    return StopStrings(given)
