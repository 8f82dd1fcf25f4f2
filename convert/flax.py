"""The directory that ``lsjax.save`` writes: Flax's own names and layouts, in safetensors, beside ``config.json``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lsjax.config import LlamaConfig
from lsjax.convert.checkpoint import Checkpoint
from lsjax.convert.huggingface import with_config
from lsjax.convert.names import FLAX
from lsjax.convert.shards import list_tensors
from lsjax.convert.writer import SHARD_BYTES, Output, split, write_json, write_weights
from lsjax.params import Params, flatten

WEIGHTS = "params.safetensors"  # or the shards that an index of this name places


def describe(directory: Path) -> Checkpoint:
    """The checkpoint that ``write`` wrote."""
    return with_config(directory, "lsjax", FLAX, list_tensors(directory, WEIGHTS))


def write(params: Params, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a model into an existing, empty directory, bit for bit in the arrays' dtypes; one array is on the host.

    More than ``shard_bytes`` of weights become several files and an index; a shard holds at least one array.
    """
    write_config(params.config, params.dtype, directory)
    outputs = [
        Output(path, leaf.shape, np.dtype(leaf.dtype), functools.partial(_fetch, leaf))
        for path, leaf in flatten(params.tree).items()
    ]
    write_weights(directory, split(outputs, WEIGHTS, shard_bytes), WEIGHTS, {"format": "flax"})


def _fetch(leaf: Any) -> np.ndarray:
    return np.asarray(jax.device_get(leaf))


def write_config(config: LlamaConfig, dtype: Any, directory: Path) -> None:
    """Writes ``config.json`` and ``generation_config.json``, as transformers reads them."""
    entries = config.to_dict()
    special = {name: entries[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(directory / "config.json", {**entries, "dtype": str(dtype)})
    write_json(directory / "generation_config.json", special)
