"""Text of tokens that come one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_BROKEN = "\N{REPLACEMENT CHARACTER}"  # what decoding gives for bytes that are no whole character
_LONGEST_WINDOW = 32  # tokens that are decoded together, before those that only give context are dropped


class Detokenizer:
    """Turns tokens into text as they come, and never gives out a part of a character.

    A token's text depends on those before it: a character may be several tokens of some bytes each, and tokenizers in
    the manner of SentencePiece drop the space of the first token that they decode. So new tokens are decoded together
    with earlier ones, and what is new is the difference. Special tokens have no text.

    All pieces together are what the tokenizer makes of the whole, ``decode(context + tokens)``, without what it makes
    of the context. (Where bytes never become a character, a tokenizer may give up on whole bytes before them as well;
    here these stay as they were given out.)

    Args:
        tokenizer: a tokenizer of transformers.
        context: ids that stand before the first token, such as the prompt's.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = [int(token) for token in context]
        self._boundary = len(self._window)  # tokens of the window whose characters are complete
        self._given = len(self._decode())  # characters of the window that were given out, or are context

    def push(self, token: int) -> str:
        """The text that this token completes; often its own, and sometimes none yet."""
        self._window.append(int(token))
        text = self._decode()
        complete = text.rstrip(_BROKEN)
        new = complete[self._given :]
        if not new:
            return ""
        if len(complete) == len(text):
            # The tokens since the last boundary have text, so they are context enough for what follows.
            if len(self._window) > _LONGEST_WINDOW:
                del self._window[: self._boundary]
                complete = self._decode()
            self._boundary = len(self._window)
        self._given = len(complete)
        return new

    def finish(self) -> str:
        """What is left at the end of the text: bytes that no longer become a character, as the tokenizer shows them."""
        text = self._decode()
        new, self._given = text[self._given :], len(text)
        return new

    def _decode(self) -> str:
        # Never what some tokenizers call cleaning: it takes back spaces that were written.
        return str(self._tokenizer.decode(self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False))
