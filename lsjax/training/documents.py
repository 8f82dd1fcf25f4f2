"""Texts and examples as the model learns from them: read from files, tokenized, some of them held out."""

from __future__ import annotations

import collections
import glob
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lsjax.checks import check_text

_BATCH = 256  # texts given to the tokenizer at a time, which it may share between threads


class Document(NamedTuple):
    """One text, or one example of what to answer.

    Attributes:
        tokens: int32 ``[length]``.
        learned: bool ``[length]``, tokens whose prediction is learned: an example's answers. None: a text, of which all
            are, and which may be split between rows.
    """

    tokens: np.ndarray
    learned: np.ndarray | None = None


def read_documents(
    files: Iterable[str | os.PathLike[str]], tokenizer: Any = None, *, progress: Callable[[int], Any] | None = None
) -> list[Document]:
    """The documents of some files, in the order of their names.

    A file is one text in UTF-8, or, where its name ends in ``.jsonl``, one document a line: ``{"text": "..."}``;
    ``{"prompt": "...", "completion": "..."}``, of which the completion is learned; ``{"messages": [{"role": "user",
    "content": "..."}, ...]}``, put into the tokenizer's chat template, of which the assistant's turns are learned; or
    ``{"tokens": [ids]}``. Texts and completions end with the tokenizer's EOS, where it has one.

    Args:
        files: paths and patterns of paths, ``**`` for folders at any depth.
        tokenizer: of :func:`~lsjax.text.tokenizer.load_tokenizer`, or any of transformers; None: only ids are read.
        progress: called with the bytes of each file that has been read.

    Raises:
        ValueError: nothing matches a pattern, a file cannot be read, or a line is none of these.
    """
    documents: list[Document] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            ids = _call(tokenizer, texts)
            documents.extend(Document(np.array(_ended(row, tokenizer), np.int32)) for row in ids)
            texts.clear()

    for path in find_files(files):
        for entry, where in _entries(path):
            match entry:
                case {"text": str(text)}:
                    if tokenizer is None:
                        raise ValueError(f"{where} is text, and there is no tokenizer: give one, or ids")
                    texts.append(text)
                    if len(texts) == _BATCH:
                        flush()
                case _:
                    flush()
                    documents.append(_read_example(entry, tokenizer, where))
        if progress is not None:
            progress(path.stat().st_size)
    flush()
    found = [document for document in documents if len(document.tokens) > 1]
    if not found:
        raise ValueError(f"files: expected documents of at least two tokens, got none in {', '.join(map(str, files))}")
    return found


def find_files(files: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files that paths and patterns name, each once, in the order of their names.

    Raises:
        ValueError: one of them names nothing.
    """
    found = set()
    for pattern in files:
        matching = {Path(name) for name in glob.glob(os.fspath(pattern), recursive=True) if Path(name).is_file()}
        if not matching:
            raise ValueError(f"files: expected a file or a pattern of files, got {str(pattern)!r}, which names none")
        found |= matching
    return sorted(found)


def _entries(path: Path) -> Iterator[tuple[Any, str]]:
    """What a file holds, entry by entry, and where each stands."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: expected text in UTF-8 ({error})") from error
    if path.suffix != ".jsonl":
        yield {"text": text}, str(path)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            where = f"line {number} of {path}"
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where}: expected JSON, got {line[:60]!r} ({error})") from error
            if "\\ud" in line.lower():  # no other line can hold half a character
                check_text(where, json.dumps(entry, ensure_ascii=False))
            yield entry, where


def _read_example(entry: Any, tokenizer: Any, where: str) -> Document:
    match entry:
        case {"tokens": [*ids]} if all(type(item) is int and 0 <= item < 2**31 for item in ids):
            return Document(np.array(ids, np.int32))
        case {"prompt": str(prompt), "completion": str(completion)} if completion:
            pieces, special = [(prompt, False), (completion, True)], True
        case {"messages": [*messages]} if messages and all(_is_message(message) for message in messages):
            pieces, special = _chat_pieces(messages, tokenizer, where), False
        case _:
            raise ValueError(
                f'{where}: expected {{"text": "..."}}, {{"prompt": "...", "completion": "..."}}, {{"messages": '
                f'[{{"role": "...", "content": "..."}}]}} or {{"tokens": [ids]}}, got {json.dumps(entry)[:60]!r}'
            )
    if tokenizer is None:
        raise ValueError(f"{where} is text, and there is no tokenizer: give one, or ids")
    ids, learned = encode_pieces(pieces, tokenizer, special=special)
    if special and len(ended := _ended(ids, tokenizer)) > len(ids):
        ids, learned = ended, [*learned, True]
    return Document(np.array(ids, np.int32), np.array(learned, bool))


def _is_message(message: Any) -> bool:
    match message:
        case {"role": str(), "content": str()}:
            return True
    return False


def _chat_pieces(messages: Sequence[dict[str, str]], tokenizer: Any, where: str) -> list[tuple[str, bool]]:
    """A conversation in the chat template, cut before and after what the assistant says."""
    if tokenizer is None:
        return []
    try:
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        ends = [0]
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = tokenizer.apply_chat_template(messages[:index], tokenize=False, add_generation_prompt=True)
                after = tokenizer.apply_chat_template(messages[: index + 1], tokenize=False)
                if not whole.startswith(after) or not after.startswith(before):
                    raise ValueError("it writes earlier turns differently once there are later ones")
                ends += [len(before), len(after)]
    except Exception as error:  # templates are programs, and raise errors of their own
        raise ValueError(f"{where}: the tokenizer's chat template does not take this conversation ({error})") from error
    if len(ends) == 1:
        raise ValueError(f'{where}: expected a message of the role "assistant" to learn from, got none')
    ends.append(len(whole))
    return [(whole[begin:end], number % 2 == 1) for number, (begin, end) in enumerate(itertools.pairwise(ends))]


def encode_pieces(pieces: Sequence[tuple[str, bool]], tokenizer: Any, *, special: bool) -> tuple[list[int], list[bool]]:
    """Ids of a text that is given in pieces, and for each whether it is of a piece that is marked.

    Each piece continues the ids of those before it, as a model continues a prompt: where the tokenizer would join
    letters of both, it begins anew.

    Args:
        pieces: texts and marks.
        tokenizer: any of transformers.
        special: whether the tokenizer puts its special tokens around texts.
    """
    ids: list[int] = []
    marked: list[bool] = []
    text = ""
    for piece, mark in pieces:
        if not piece:
            continue
        text += piece
        (whole,) = _call(tokenizer, [text], special=special)
        if whole[: len(ids)] != ids:
            (rest,) = _call(tokenizer, [piece], special=False)
            whole = ids + rest
        marked += [mark] * (len(whole) - len(ids))
        ids = whole
    return ids, marked


def _call(tokenizer: Any, texts: list[str], *, special: bool = True) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=special, verbose=False)["input_ids"]  # not: "longer than the model's"


def _ended(ids: list[int], tokenizer: Any) -> list[int]:
    eos = tokenizer.eos_token_id
    return ids if eos is None or (ids and ids[-1] == eos) else [*ids, eos]


def hold_out(documents: Sequence[Document], share: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and others to look at the model with: about so large a share of all tokens, at random.

    The end of a single text is held out, where there is but one.

    Args:
        documents: at least one.
        share: above 0 and below 1.
        seed: of the choice.

    Raises:
        ValueError: nothing would be left to train on, or to hold out.
    """
    if not 0 < share < 1:
        raise ValueError(f"held_out: expected a share above 0 and below 1, got {share!r}")
    if len(documents) == 1 and documents[0].learned is None:
        tokens = documents[0].tokens
        cut = round(len(tokens) * (1 - share))
        documents = [Document(tokens[:cut]), Document(tokens[cut:])]
        held = {1}
    else:
        wanted = share * sum(len(document.tokens) for document in documents)
        held = set()
        for index in np.random.default_rng(seed).permutation(len(documents)).tolist():
            held.add(index)
            wanted -= len(documents[index].tokens)
            if wanted <= 0:
                break
    training = [document for index, document in enumerate(documents) if index not in held]
    held_out = [documents[index] for index in sorted(held)]
    for name, part in (("train on", training), ("hold out", held_out)):
        if not any(len(document.tokens) > 1 for document in part):
            raise ValueError(f"held_out: {len(documents)} documents leave nothing to {name} with a share of {share}")
    return training, held_out


def take_prompts(documents: Sequence[Document], count: int, length: int, seed: int) -> list[np.ndarray]:
    """Prompts out of documents: passages of texts, and of examples what stands before the first answer.

    Args:
        documents: what to take from. Only where there are too few, long texts give several passages.
        count: at most how many.
        length: the most tokens of a prompt.
        seed: of the choice.

    Returns:
        int32 arrays; none from documents that are too short.
    """
    rng = np.random.default_rng(seed)
    prompts: list[np.ndarray] = []
    queue = collections.deque(rng.permutation(len(documents)).tolist())
    while queue and len(prompts) < count:
        index = queue.popleft()
        tokens, learned = documents[index]
        if learned is not None:
            prompt = tokens[: int(np.argmax(learned))][-length:]
        elif len(tokens) > length:
            begin = int(rng.integers(0, len(tokens) - length))
            prompt = tokens[begin : begin + length]
            queue.append(index)  # another passage, once all others have had their turn
        else:
            prompt = tokens[:-1]
        if len(prompt):
            prompts.append(prompt)
    return prompts
