"""What a model answers to a chat that it reads from the beginning, by one program for all lengths."""

from __future__ import annotations

from typing import Any

import numpy as np

import lsjax
from lsjax.text.generator import TextGenerator
from lsjax.text.prompts import encode, pad_rows

WIDTH = 176


def answer_alone(generator: TextGenerator, messages: list[dict[str, str]], new: int, **options: Any) -> str:
    """The text of ``new`` tokens after a chat of at most ``WIDTH`` tokens, which end early at an EOS."""
    tokens = encode(messages, generator.tokenizer)
    rows, lengths = pad_rows([tokens, [0] * WIDTH])
    options = {"max_new_tokens": new, "capacity": WIDTH + new, **options}
    out = lsjax.generate(generator.params, rows[:1], prompt_lengths=lengths[:1], **options)
    written = np.asarray(out.tokens)[0, len(tokens) : int(out.lengths[0])]
    return str(generator.tokenizer.decode(written, skip_special_tokens=True))


def answers_alone(
    generator: TextGenerator, said: list[str], new: int, system: str | None = None, **options: Any
) -> list[str]:
    """The answers to each message of a user in turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    found = []
    for text in said:
        messages.append({"role": "user", "content": text})
        found.append(answer_alone(generator, messages, new, **options))
        messages.append({"role": "assistant", "content": found[-1]})
    return found
