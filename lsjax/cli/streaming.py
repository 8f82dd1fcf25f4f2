"""Text on the terminal while it is written: accepted drafts in one colour, the model's own tokens in another."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

import jax

from lsjax.cli.session import Answer, Session, interruptible, note
from lsjax.text.streaming import TextPiece

_DRAFTED, _OWN, _PLAIN = "\033[32m", "\033[35m", "\033[0m"
LEGEND = "green: accepted drafts, magenta: the model's own tokens"


class Display:
    """Prints pieces of text at once.

    Args:
        file: where to.
        colored: whether to colour them, where ``file`` is a terminal that takes colours (``NO_COLOR`` is respected).
    """

    def __init__(self, file: TextIO, *, colored: bool = True) -> None:
        self._file = file
        wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.colored = colored and wanted and file.isatty()

    def show(self, piece: TextPiece) -> None:
        """Prints a piece."""
        for text, drafted in piece.runs:
            self._file.write(f"{_DRAFTED if drafted else _OWN}{text}{_PLAIN}" if self.colored else text)
        self._file.flush()


def run(session: Session) -> int:
    """Answers one prompt after the other with the strategy that was asked for, as the text is written."""
    options = session.decoding(session.options.strategy)
    key = options.pop("key", None)
    display = Display(sys.stdout, colored=session.options.strategy == "self_speculative")
    note("compiling and generating")
    start, results = time.perf_counter(), []
    for index, prompt in enumerate(session.prompts.texts):
        session.head(index)
        if key is not None:  # the row of a batch that this would be
            options["key"] = jax.random.fold_in(key, index)[None]
        with interruptible():
            stream = session.generator.stream(prompt, chat=session.options.chat, stop=session.options.stop, **options)
            for piece in stream:
                display.show(piece)
        print(flush=True)
        results.append(stream.result)
    answer = Answer.of_results(session.options.strategy, time.perf_counter() - start, results)
    print(answer.line() + (f" ({LEGEND})" if display.colored else ""), file=sys.stderr)
    return 0
