"""The tokenizer of a model: transformers' own, or built from a GGUF file's metadata."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from lsjax.convert.checkpoint import CheckpointError
from lsjax.convert.files import is_there, read_json, trouble
from lsjax.convert.huggingface import VOCABULARY_FILES
from lsjax.sources import TOKENIZER_FILES, locate
from lsjax.text.gguf_vocabulary import read_tokenizer

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerFast

_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")  # transformers 4's and 5's names of one class


def load_tokenizer(
    source: str | os.PathLike[str], *, revision: str | None = None, progress: bool | None = None
) -> PreTrainedTokenizerFast:
    """Loads the tokenizer that belongs to a model.

    Args:
        source: what ``lsjax.load`` takes. Of a hub id only the tokenizer's files are fetched. A directory that
            ``lsjax.save`` wrote holds a tokenizer only if one was put there (``tokenizer.save_pretrained``).
        revision: a branch, tag or commit of a hub id.
        progress: whether to show the progress of fetching; None: where stderr is a terminal.

    Returns:
        a transformers tokenizer: call it on text for ``input_ids``, ``decode`` ids, ``apply_chat_template``.

    Raises:
        FileNotFoundError: no such source, or a directory without a tokenizer.
        CheckpointError: (a ValueError) a GGUF file with a vocabulary or pre-tokenizer that lsjax does not know; files
            that are damaged, pointers, or no files.
        as ``lsjax.load``, as far as finding and fetching go.
    """
    path = locate(source, revision=revision, progress=progress, files=TOKENIZER_FILES)
    if path.is_file():
        return read_tokenizer(path)
    if not any(is_there(path / name) for name in VOCABULARY_FILES):
        raise FileNotFoundError(f"{path} holds no tokenizer: expected tokenizer.json, tokenizer.model or vocab.json")
    problems = [problem for name in TOKENIZER_FILES if is_there(path / name) and (problem := trouble(path / name))]
    if problems:
        raise CheckpointError(path, problems)
    is_plain = _is_plain(path)
    try:
        if is_plain:  # AutoTokenizer would come to the same, and import torch for it where that is installed
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)  # None would ask on the terminal
    except ImportError:  # a package that this tokenizer needs, by name
        raise
    except BaseException as error:  # whatever transformers meets in a damaged file; Rust's panics are no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            path, [f"transformers cannot read its tokenizer: {type(error).__name__}: {error}"]
        ) from error


def _is_plain(path: Path) -> bool:
    """Whether a directory names the class that takes all from ``tokenizer.json``, as those of Llama 3 do."""
    try:
        entries = read_json(path / "tokenizer_config.json")
    except CheckpointError:  # absent, or for transformers to judge
        return False
    return entries.get("tokenizer_class") in _PLAIN and "auto_map" not in entries and is_there(path / "tokenizer.json")
