"""Texts as the model reads them: encoded, in chat format where wanted, and padded to a batch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lsjax.checks import check_text

# Prompts of different kinds and lengths, for looking at a model without having any of one's own.
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old clockmaker who",
    "def fibonacci(n):\n    ",
    "Ingredients for pancakes: two eggs, 300 ml of milk,",
    "Q: Why is the sky blue?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics say that energy",
    "1, 1, 2, 3, 5, 8,",
)


def encode(prompt: str | Sequence[Mapping[str, Any]], tokenizer: Any, *, chat: bool = False) -> np.ndarray:
    """A prompt's ids, int32 ``[length]``.

    Args:
        prompt: a text; or a chat, messages ``{"role": ..., "content": ...}``, the last of which is to be answered.
        tokenizer: of :func:`~lsjax.text.tokenizer.load_tokenizer`, or any of transformers.
        chat: put a text into the tokenizer's chat template, as a user's turn that is to be answered.

    Raises:
        ValueError: a text with lone surrogates; messages that are none; a chat, and the tokenizer has no chat template
            or the template refuses it.
    """
    if isinstance(prompt, str):
        check_text("prompt", prompt)
        if not chat:
            return np.array(tokenizer(prompt)["input_ids"], np.int32)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(prompt)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat: expected a tokenizer with a chat template, got one whose chat_template is None")
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        raise ValueError(f"chat: the tokenizer's chat template refuses these messages: {error}") from error
    # A chat template writes the special tokens itself.
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


def _messages(given: Any) -> list[dict[str, Any]]:
    """A chat's messages, checked."""
    messages = list(given)
    for message in messages:
        match message:
            case {"role": str(), "content": str(content)}:
                check_text("messages", content)
                continue
        raise ValueError(f'messages: expected {{"role": "user", "content": "..."}} and so on, got {message!r}')
    if not messages:
        raise ValueError("messages: expected at least one, got an empty list")
    return [dict(message) for message in messages]


def pad_rows(rows: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ids as one batch: int32 ``[batch, width]`` padded on the right with 0, and lengths int32 ``[batch]``."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.zeros((len(rows), lengths.max(initial=0)), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return tokens, lengths


def read_file(name: str | os.PathLike[str]) -> list[str | list[int]]:
    """A file of prompts in UTF-8: one a line, blank lines left out.

    In a ``.jsonl`` file a line is ``{"prompt": "..."}`` or ``{"tokens": [ids]}``; other keys are passed over.

    Returns:
        texts, and lists of ids.

    Raises:
        ValueError: no text in UTF-8, no prompts, or a line that is none.
    """
    try:
        text = Path(name).read_text(encoding="utf-8-sig")  # line breaks of other systems are \n by now
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a text file in UTF-8, got {str(name)!r} ({error})") from error
    lines = {number: line for number, line in enumerate(text.split("\n"), start=1) if line.strip()}
    if not lines:
        raise ValueError(f"expected a prompt a line, got nothing in {str(name)!r}")
    if Path(name).suffix != ".jsonl":
        return list(lines.values())
    return [read_json(line, f"line {number} of {str(name)!r}") for number, line in lines.items()]


def read_json(line: str, where: str) -> str | list[int]:
    """The prompt of one line of a ``.jsonl`` file.

    Args:
        line: a JSON object.
        where: the line's place, for the error.
    """
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    match entry:
        case {"prompt": str(text)} if text:
            return check_text(where, text)
        case {"tokens": [*ids]} if ids and all(type(item) is int and 0 <= item < 2**31 for item in ids):
            return ids
    raise ValueError(f'expected {{"prompt": "..."}} or {{"tokens": [ids]}} in {where}, got {line[:60]!r}')
