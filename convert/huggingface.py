"""A model directory in Hugging Face layout: ``config.json``, perhaps ``generation_config.json``, and the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lsjax.config import LlamaConfig
from lsjax.convert.checkpoint import Checkpoint, CheckpointError, Format, Listing
from lsjax.convert.files import is_there, read_json
from lsjax.convert.names import HUGGINGFACE, Table, Target
from lsjax.convert.shards import list_tensors

WEIGHTS = "model.safetensors"  # or the shards that an index of this name places
TARGET = Target(HUGGINGFACE, WEIGHTS, "pt")  # transformers wants this word
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # one of them makes a tokenizer


def describe(directory: Path) -> Checkpoint:
    """The checkpoint of ``model.safetensors``, or of ``model.safetensors.index.json`` and its shards."""
    return with_config(directory, "safetensors", HUGGINGFACE, list_tensors(directory, WEIGHTS))


def with_config(directory: Path, kind: Format, table: Table, listing: Listing) -> Checkpoint:
    """A listing together with what the directory's JSON files say of the model; problems are kept, not raised."""
    found: dict[str, dict[str, Any]] = {}
    problems = []
    for name in ("config.json", "generation_config.json"):
        if name != "config.json" and not is_there(directory / name):
            continue
        try:
            found[name] = read_json(directory / name)
        except CheckpointError as error:
            problems += error.problems
    entries, generation = found.get("config.json", {}), found.get("generation_config.json", {})
    config = None
    if not problems:
        try:
            config = LlamaConfig.from_dict(entries, generation)
        except (ValueError, TypeError) as error:
            problems.append(f"config.json: {error}")
    return Checkpoint(directory, kind, table, listing, config, tuple(problems), entries, generation)
