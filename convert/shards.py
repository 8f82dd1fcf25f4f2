"""Headers of a safetensors checkpoint, in one file or in shards with an index, as transformers lays them out."""

from __future__ import annotations

import collections
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from lsjax.convert.checkpoint import DTYPES, CheckpointError, Listing, Stored, read_array

ReadHeader = Callable[[Path], tuple[list[Stored], list[str]]]  # the tensors of a file, and what is wrong with it


def list_tensors(directory: Path, weights: str, read_header: ReadHeader | None = None) -> Listing:
    """What the file ``weights`` holds, or where ``{weights}.index.json`` is, the shards that it names.

    The index decides, so a single file beside it counts only if the index names it. No data is read; problems are
    listed, not raised.
    """
    single, index = directory / weights, directory / f"{weights}.index.json"
    read_header = read_header or read_safetensors_header
    if not index.is_file():
        found, problems = read_header(single)
        return Listing(tuple(found), tuple(problems))
    placed, problems = _read_index(index)
    tensors: list[Stored] = []
    lost: set[str] = set()
    for shard in sorted(set(placed.values())):
        names = {name for name, where in placed.items() if where == shard}
        found, trouble = read_header(directory / shard)
        held = {tensor.name for tensor in found}
        if found:
            trouble += [f"missing: {name}, which {index.name} places in {shard}" for name in sorted(names - held)]
            trouble += [f"unexpected: {name} in {shard}, not in {index.name}" for name in sorted(held - placed.keys())]
        else:
            trouble = [f"{line}; it should hold {', '.join(sorted(names))}" for line in trouble]
        problems += trouble
        lost |= names ^ held
        tensors += [tensor for tensor in found if tensor.name in placed]
    return Listing(tuple(tensors), tuple(problems), frozenset(lost))


def _read_index(index: Path) -> tuple[dict[str, str], list[str]]:
    """Tensor names to the shards that hold them, and what is wrong with the index."""
    try:
        content, repeated = _parse(index.read_bytes())
    except (ValueError, RecursionError) as error:
        return {}, [f"not JSON: {index.name}: {error}"]
    placed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(placed, dict) or not placed:
        return {}, [f"wrong index: {index.name}: expected an object weight_map from tensor names to file names"]
    problems = [f"twice: {name} in {index.name}" for name in repeated]
    outside = [name for name, shard in placed.items() if not isinstance(shard, str) or Path(shard).name != shard]
    problems += [f"wrong index: {index.name}: {name}: expected a file name, got {placed[name]!r}" for name in outside]
    return {name: shard for name, shard in placed.items() if name not in outside}, problems


def read_safetensors_header(path: Path) -> tuple[list[Stored], list[str]]:
    """The tensors of one file, and what is wrong with it; safetensors checks that offsets and sizes fit the file."""
    if not path.is_file():
        return [], [f"absent: {path.name}"]
    try:
        with safe_open(path, framework="numpy"):
            pass  # checked; but what it reads stays in memory with the mapped file, so tensors are read by offset
        with path.open("rb") as raw:
            size = int.from_bytes(raw.read(8), "little")
            header, repeated = _parse(raw.read(size))
        header.pop("__metadata__", None)
        found = []
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            shape, dtype = tuple(entry["shape"]), entry["dtype"]
            offset = 8 + size + entry["data_offsets"][0]
            read = functools.partial(read_array, path, offset, shape, DTYPES.get(dtype, np.dtype(np.uint8)))
            size_in_file = entry["data_offsets"][1] - entry["data_offsets"][0]
            found.append(Stored(name, shape, dtype, path.name, read, size_in_file))
    except (SafetensorError, OSError, ValueError) as error:
        return [], [f"truncated or altered: {path.name} ({path.stat().st_size:,} bytes): {error}"]
    if not found:
        return [], [f"empty: {path.name} holds no tensors"]
    return found, [f"twice: {name} in {path.name}" for name in repeated]


def _parse(data: bytes) -> tuple[Any, list[str]]:
    """A JSON value, and the keys that stand twice in one object (the last would win)."""
    repeated: list[str] = []

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = collections.Counter(key for key, _ in pairs)
        repeated.extend(key for key, count in counts.items() if count > 1)
        return dict(pairs)

    return json.loads(data, object_pairs_hook=make), repeated


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: it is no JSON object.
        OSError: it cannot be read.
    """
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(path, [f"not JSON: {error}"]) from error
    if not isinstance(value, dict):
        raise CheckpointError(path, [f"expected a JSON object, got {type(value).__name__}"])
    return value
