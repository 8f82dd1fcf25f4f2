"""The directory that ``lsjax.save`` writes: Flax's own names and layouts, in safetensors, beside ``config.json``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsjax.config import LlamaConfig
from lsjax.convert.checkpoint import Checkpoint
from lsjax.convert.huggingface import with_config
from lsjax.convert.names import FLAX, Target, source_shape
from lsjax.convert.shards import list_tensors
from lsjax.convert.writer import SHARD_BYTES, Output, split, write_json, write_weights

if TYPE_CHECKING:
    from lsjax.params import Params

WEIGHTS = "params.safetensors"  # or the shards that an index of this name places
TARGET = Target(FLAX, WEIGHTS, "flax")


def describe(directory: Path) -> Checkpoint:
    """The checkpoint that ``write`` wrote."""
    return with_config(directory, "lsjax", FLAX, list_tensors(directory, WEIGHTS))


def write(params: Params, directory: Path, shard_bytes: int = SHARD_BYTES, target: Target = TARGET) -> None:
    """Writes a model into an existing directory, bit for bit in the arrays' dtypes; one array is on the host.

    More than ``shard_bytes`` of weights become several files and an index; a shard holds at least one array. Names and
    layouts are those of ``target``, Flax's own or another format's.
    """
    from lsjax.params import flatten  # here, since headers are read without JAX

    write_config(params.config, params.dtype, directory)
    outputs = []
    for path, leaf in flatten(params.tree).items():
        name, transform = target.table.from_flax(path)
        read = functools.partial(_fetch, leaf, transform == "transpose")
        outputs.append(Output(name, source_shape(transform, leaf.shape), np.dtype(leaf.dtype), read))
    write_weights(directory, split(outputs, target.weights, shard_bytes), target.weights, {"format": target.format})


def _fetch(leaf: Any, transpose: bool) -> np.ndarray:
    array = np.asarray(leaf)
    return array.T if transpose else array


def write_config(config: LlamaConfig, dtype: Any, directory: Path) -> None:
    """Writes ``config.json`` and ``generation_config.json``, as transformers reads them."""
    entries = config.to_dict()
    special = {name: entries[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_json(directory / "config.json", {**entries, "dtype": str(dtype)})
    write_json(directory / "generation_config.json", special)
