"""A model directory in Hugging Face layout: ``config.json`` and safetensors, in one file or in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lsjax.config import LlamaConfig
from lsjax.convert.assemble import CheckpointError, assemble
from lsjax.convert.files import read_json
from lsjax.convert.names import HUGGINGFACE
from lsjax.convert.shards import list_tensors
from lsjax.params import Params

STEM = "model"  # of the weights' files


def read_config(directory: Path) -> LlamaConfig:
    """The configuration in ``config.json``, with the special token ids of ``generation_config.json``.

    Raises:
        CheckpointError: a file is absent or no JSON object, or does not describe a Llama that lsjax computes.
    """
    config = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    special = read_json(generation) if generation.exists() or generation.is_symlink() else None
    try:
        return LlamaConfig.from_dict(config, special)
    except (ValueError, TypeError) as error:
        raise CheckpointError(directory, [f"config.json: {error}"]) from error


def load(directory: Path, dtype: Any = None, progress: bool | None = None) -> Params:
    """The model in a directory.

    Args:
        directory: holds ``config.json``, perhaps ``generation_config.json``, and ``model.safetensors`` or
            ``model.safetensors.index.json`` with its shards.
        dtype: a floating dtype for all weights; None: each as stored.
        progress: whether to show a bar; None: on a terminal.

    Raises:
        CheckpointError: names everything that is missing or does not fit.
    """
    config = read_config(directory)
    return assemble(directory, config, list_tensors(directory, STEM), HUGGINGFACE, dtype, progress)
