"""The directory that ``lsjax.save`` writes: Flax's own names and layouts, in safetensors, beside ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from lsjax.convert.checkpoint import Checkpoint
from lsjax.convert.huggingface import with_config
from lsjax.convert.names import FLAX
from lsjax.convert.shards import list_tensors
from lsjax.params import Params, flatten

STEM = "params"  # of the weights' files
WEIGHTS = f"{STEM}.safetensors"
SHARD_BYTES = 5 * 10**9  # one shard is on the host at a time


def describe(directory: Path) -> Checkpoint:
    """The checkpoint that ``write`` wrote."""
    return with_config(directory, "lsjax", FLAX, list_tensors(directory, WEIGHTS))


def write(params: Params, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a model into an existing, empty directory, bit for bit in the arrays' dtypes.

    More than ``shard_bytes`` of weights become several files and an index; a shard holds at least one array.
    """
    write_config(params, directory)
    leaves = flatten(params.tree)
    shards = list(_split(leaves, shard_bytes))
    placed = {}
    for number, paths in enumerate(shards, start=1):
        part = "" if len(shards) == 1 else f"-{number:05}-of-{len(shards):05}"
        name = f"{STEM}{part}.safetensors"
        arrays = {path: np.ascontiguousarray(jax.device_get(leaves[path])) for path in paths}
        save_file(arrays, directory / name, metadata={"format": "flax"})
        placed |= dict.fromkeys(paths, name)
    if len(shards) > 1:
        index = {"metadata": {"total_size": params.num_bytes}, "weight_map": placed}
        _write_json(directory / f"{STEM}.safetensors.index.json", index)


def write_config(params: Params, directory: Path) -> None:
    """Writes ``config.json`` and ``generation_config.json``, as transformers reads them."""
    config = params.config.to_dict()
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "config.json", {**config, "dtype": str(params.dtype)})
    _write_json(directory / "generation_config.json", special)


def is_written(directory: Path) -> bool:
    """Whether everything in a directory is what ``write`` writes."""
    names = {path.name for path in directory.iterdir()}
    ours = {"config.json", "generation_config.json", f"{STEM}.safetensors.index.json"}
    weights = {name for name in names if name.startswith(STEM) and name.endswith(".safetensors")}
    return bool(weights) and "config.json" in names and names <= ours | weights


def _split(leaves: dict[str, Any], shard_bytes: int) -> Iterator[list[str]]:
    """The paths of each shard, in the tree's order."""
    shard: list[str] = []
    size = 0
    for path, leaf in leaves.items():
        if shard and size + leaf.nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(path)
        size += leaf.nbytes
    yield shard


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
