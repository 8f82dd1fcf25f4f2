"""A checkpoint known from its headers: its configuration and its tensors, before any weight is read."""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from lsjax.config import LlamaConfig
from lsjax.convert.names import Table

# safetensors' names of the dtypes that weights may be stored in.
DTYPES = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}

Format = Literal["safetensors", "pytorch", "gguf", "lsjax"]


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded.

    Attributes:
        problems: one line for everything that is wrong with it.
    """

    def __init__(self, where: object, problems: Iterable[str]) -> None:
        self.problems = tuple(map(one_line, problems))
        super().__init__(f"cannot load {where}:\n  " + "\n  ".join(self.problems))


def one_line(problem: str, longest: int = 2000) -> str:
    """A line that can be shown, whatever names and values from a file stand in it."""
    if len(problem) > longest:
        problem = f"{problem[: longest // 2]} ... {problem[-longest // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in problem)


@dataclasses.dataclass(frozen=True)
class Stored:
    """One tensor of a checkpoint, as a header describes it.

    Attributes:
        name: its name in the checkpoint.
        shape: its shape as stored.
        dtype: a key of ``DTYPES``, or whatever else the header says.
        where: the file, for messages.
        read: reads it, as a NumPy array of this shape and dtype.
        stored_bytes: what it takes in its file.
        stored_as: how its file stores it, where ``read`` gives another dtype (GGUF's quantizations).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    where: str
    read: Callable[[], np.ndarray]
    stored_bytes: int = 0
    stored_as: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the array that ``read`` returns; ``dtype`` must be in ``DTYPES``."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclasses.dataclass(frozen=True)
class Listing:
    """What a checkpoint's headers say, before any data is read.

    Attributes:
        tensors: every tensor of every file that could be read.
        problems: what is wrong with the files, one line each.
        lost: names that these problems already account for, such as those of an absent shard.
    """

    tensors: tuple[Stored, ...]
    problems: tuple[str, ...] = ()
    lost: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint, as far as its headers tell.

    Attributes:
        where: its directory or file.
        format: how its weights are stored.
        table: that format's names.
        listing: its tensors.
        config: what the model computes; None where that cannot be read, or lsjax does not compute it.
        problems: why there is no ``config``, one line each.
        entries: all that ``config.json``, or a GGUF file's metadata, says, used or not; empty where it is unreadable.
        generation_entries: the same of ``generation_config.json``.
    """

    where: Path
    format: Format
    table: Table
    listing: Listing
    config: LlamaConfig | None
    problems: tuple[str, ...] = ()
    entries: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    generation_entries: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read_array(path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array within a file, mapped into memory: read-only, and of the file until it is copied.

    Twice as fast as reading. What another process writes meanwhile is seen; cutting the file short ends this one.

    Raises:
        CheckpointError: the file ends before the array does.
        OSError: the file cannot be read.
    """
    count = math.prod(shape)
    end = offset + count * dtype.itemsize
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < end:
            raise CheckpointError(path, [f"truncated: expected {end:,} bytes, got {size:,}"])
        if not count:
            return np.empty(shape, dtype)
        start = offset - offset % mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(file.fileno(), end - start, access=mmap.ACCESS_READ, offset=start)
    array = np.frombuffer(mapped, dtype, count, offset - start).reshape(shape)
    return array if array.flags.aligned else array.copy()
