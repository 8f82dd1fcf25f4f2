"""Writes safetensors files tensor by tensor, so that no more than one of them is in memory.

The format (https://github.com/huggingface/safetensors#format): eight bytes with the header's length, little-endian; a
JSON header of names, dtypes, shapes and offsets; the tensors' bytes without gaps.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lsjax.convert.cast import cast
from lsjax.convert.checkpoint import DTYPES

SHARD_BYTES = 5 * 10**9
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_BLOCK_BYTES = 8 * 2**20  # what is cast or transposed at a time


@dataclasses.dataclass(frozen=True)
class Output:
    """One tensor to be written.

    Attributes:
        name: its name in the file.
        shape: its shape in the file.
        dtype: its dtype in the file.
        read: makes an array of this shape, of any dtype and in any layout.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file to be written."""

    name: str
    outputs: tuple[Output, ...]


def split(outputs: Sequence[Output], weights: str, shard_bytes: int = SHARD_BYTES) -> tuple[Shard, ...]:
    """Spreads tensors over files, in the order given.

    Args:
        outputs: at least one.
        weights: the name of a single file, such as ``model.safetensors``; several get a number each.
        shard_bytes: of data in a file at most, except that each holds at least one tensor.
    """
    groups: list[list[Output]] = [[]]
    size = 0
    for output in outputs:
        if groups[-1] and size + output.num_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(output)
        size += output.num_bytes
    stem = Path(weights).stem
    names = [f"{stem}-{number:05}-of-{len(groups):05}.safetensors" for number in range(1, len(groups) + 1)]
    return tuple(
        # The wider dtypes first: each array then starts at a multiple of its items' size.
        Shard(name, tuple(sorted(group, key=lambda output: -output.dtype.itemsize)))
        for name, group in zip(names if len(groups) > 1 else [weights], groups, strict=True)
    )


def write_weights(
    directory: Path,
    shards: Sequence[Shard],
    weights: str,
    metadata: Mapping[str, str],
    advance: Callable[[int], object] = lambda num_bytes: None,
) -> list[str]:
    """Writes every shard, and an index beside several; returns the names of tensors that did not fit their dtype.

    Args:
        directory: where to; it exists.
        shards: of ``split``.
        weights: as of ``split``.
        metadata: put into each header; ``files`` is added: what the directory then holds.
        advance: told the bytes of each block that was written.
    """
    index = [f"{weights}.index.json"] if len(shards) > 1 else []
    names = {path.name for path in directory.iterdir()} | {shard.name for shard in shards} | set(index)
    metadata = {**metadata, "files": json.dumps(sorted(names))}
    overflowed = []
    for shard in shards:
        with (directory / shard.name).open("wb") as file:
            file.write(_header(shard.outputs, metadata))
            overflowed += [output.name for output in shard.outputs if _write_tensor(file, output, advance)]
    for name in index:
        placed = {output.name: shard.name for shard in shards for output in shard.outputs}
        total = sum(output.num_bytes for shard in shards for output in shard.outputs)
        write_json(directory / name, {"metadata": {"total_size": total}, "weight_map": placed})
    return overflowed


def written_files(directory: Path) -> frozenset[str]:
    """The files that ``write_weights`` knew to be in a directory; empty where it wrote no weights there."""
    from safetensors import SafetensorError, safe_open

    found: set[str] = set()
    for path in directory.glob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy") as file:
                found |= set(json.loads((file.metadata() or {}).get("files", "[]")))
        except (SafetensorError, OSError, ValueError, TypeError):
            return frozenset()
    return frozenset(found)


def write_json(path: Path, value: Any) -> None:
    """An object as a JSON file for people to read."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _header(outputs: Sequence[Output], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for output in outputs:
        start, end = end, end + output.num_bytes
        entries[output.name] = {
            "dtype": _NAMES[output.dtype],
            "shape": list(output.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # so that the data is aligned
    return len(header).to_bytes(8, "little") + header


def _write_tensor(file: BinaryIO, output: Output, advance: Callable[[int], object]) -> bool:
    """Writes one tensor, nothing of which is left in memory; whether numbers of it became infinite."""
    overflows = False
    for block, too_large in _blocks(output):
        file.write(block.reshape(-1).view(np.uint8).data)
        overflows |= too_large
        advance(block.nbytes)
    return overflows


def _blocks(output: Output) -> Iterator[tuple[np.ndarray, bool]]:
    """The tensor in contiguous blocks of rows, and whether numbers of each became infinite."""
    view = output.read()
    if view.dtype == output.dtype and view.flags.c_contiguous:
        yield view, False
        return
    row_bytes = max(math.prod(view.shape[1:]) * output.dtype.itemsize, 1)
    rows = max(_BLOCK_BYTES // row_bytes, 1)
    for start in range(0, len(view), rows):
        yield cast(view[start : start + rows], output.dtype)
