"""The header of a GGUF file: its metadata, and where each tensor lies. Nothing in it is believed before it is checked.

Read here and not by the gguf package, whose reader trusts every length and takes seconds for a vocabulary. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np

from lsjax.convert.checkpoint import CheckpointError
from lsjax.convert.files import trouble

# The value types of the metadata by number, as struct's formats; and two that are not of one size.
_NUMBERS = dict(enumerate("BbHhIif?")) | dict(zip((10, 11, 12), "Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")  # of a string

# The format's limits, and for a tensor's dimensions ggml's.
_LONGEST_KEY = 2**16 - 1
_LONGEST_NAME = 64
_MOST_DIMENSIONS = 4
_LEAST_ENTRY = 8 + 4 + 1  # bytes of a key without letters, its type, and the smallest value
_LEAST_TENSOR = 8 + 4 + 4 + 8  # bytes of an empty name, a count of dimensions, a type, and an offset


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is.

    Attributes:
        name: its name.
        shape: in NumPy's order, the fastest dimension last.
        kind: ggml's number for its type.
        offset: its first byte, from the start of the tensors' data.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says before its data.

    Attributes:
        metadata: ``{"general.architecture": "llama", ...}``; arrays are lists.
        tensors: in the file's order.
        alignment: a power of two, of which every tensor's offset is a multiple.
        start: where the tensors' data begin in the file.
        size: bytes of the file.
    """

    metadata: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    start: int
    size: int


def read_header(path: Path) -> Header:
    """The header of a GGUF file of version 2 or 3.

    Raises:
        CheckpointError: not a GGUF file, or its header is cut off or contradicts itself.
    """
    if problem := trouble(path):
        raise CheckpointError(path, [problem])
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _read(_Cursor(memoryview(mapped)))
    except ValueError as error:
        raise CheckpointError(path, [f"not GGUF, truncated or altered: {error}"]) from error


class _Cursor:
    """A place in a file that only moves forward, and never past the end."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.place = data, 0

    def take(self, size: int, what: str) -> memoryview:
        left = len(self.data) - self.place
        if size > left:
            raise ValueError(f"{what} at byte {self.place:,}: expected {size:,} bytes, got {left:,} to the file's end")
        self.place += size
        return self.data[self.place - size : self.place]

    def numbers(self, form: str, count: int, what: str) -> list[Any]:
        taken = self.take(count * struct.calcsize("<" + form), what)
        if form == "?" and not {0, 1}.issuperset(taken):
            raise ValueError(f"{what}: expected booleans of 0 or 1, got other bytes")
        return np.frombuffer(taken, "<" + form).tolist()

    def number(self, form: str, what: str) -> Any:
        return self.numbers(form, 1, what)[0]

    def text(self, what: str, longest: int | None = None) -> str:
        return self.texts(1, what, longest)[0]

    def texts(self, count: int, what: str, longest: int | None = None) -> list[str]:
        """Strings; a vocabulary has a hundred thousand, so they are read in one tight loop."""
        data, place, end, found = self.data, self.place, len(self.data), []
        for _ in range(count):
            start = place + 8
            (size,) = _LENGTH.unpack_from(data, place) if start <= end else (0,)
            place = start + size
            if place > end:
                raise ValueError(f"{what} at byte {start - 8:,}: expected {size + 8:,} bytes, got the file's end")
            if longest is not None and size > longest:
                raise ValueError(f"{what}: expected at most {longest:,} bytes, got {size:,}")
            try:
                found.append(str(data[start:place], "utf-8"))
            except UnicodeDecodeError as error:
                raise ValueError(f"{what}: expected UTF-8: {error}") from error
        self.place = place
        return found

    def count(self, least: int, what: str) -> int:
        """A number of things that take ``least`` bytes each."""
        found, left = self.number("Q", what), len(self.data) - self.place
        if found * least > left:
            raise ValueError(f"{what}: got {found:,}, more than {left:,} bytes to the file's end can hold")
        return found


def _read(cursor: _Cursor) -> Header:
    magic = bytes(cursor.take(4, "the magic"))
    if magic != b"GGUF":
        raise ValueError(f"expected the magic b'GGUF', got {magic!r}")
    version = cursor.number("I", "the version")
    if version and version & 0xFFFF == 0:
        raise ValueError("expected a little-endian file, got a big-endian one")
    if version not in (2, 3):
        raise ValueError(f"expected version 2 or 3, got {version}")
    num_tensors = cursor.count(_LEAST_TENSOR, "the number of tensors")
    metadata: dict[str, Any] = {}
    for _ in range(cursor.count(_LEAST_ENTRY, "the number of entries")):
        name = cursor.text("a key", _LONGEST_KEY)
        if name in metadata:
            raise ValueError(f"{_short(name)} stands twice in the metadata")
        metadata[name] = _value(cursor, _short(name))
    tensors = [_tensor(cursor) for _ in range(num_tensors)]
    names = {tensor.name for tensor in tensors}
    for tensor in tensors if len(names) < len(tensors) else ():
        if tensor.name not in names:
            raise ValueError(f"the tensor {tensor.name} stands twice")
        names.remove(tensor.name)
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment: expected a power of two, got {_short(repr(alignment))}")
    start = -(-cursor.place // alignment) * alignment
    return Header(metadata, tuple(tensors), alignment, start, len(cursor.data))


def _value(cursor: _Cursor, name: str) -> Any:
    kind = cursor.number("I", f"the type of {name}")
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind], name)
    if kind == _STRING:
        return cursor.text(name)
    if kind != _ARRAY:
        raise ValueError(f"{name}: expected a value of type 0 to 12, got type {kind}")
    kind = cursor.number("I", f"the type of {name}")
    if kind in _NUMBERS:
        form = _NUMBERS[kind]
        return cursor.numbers(form, cursor.count(struct.calcsize("<" + form), name), name)
    if kind == _STRING:
        return cursor.texts(cursor.count(8, name), name)
    raise ValueError(f"{name}: expected an array of numbers or strings, got one of type {kind}")


def _tensor(cursor: _Cursor) -> TensorInfo:
    name = cursor.text("a tensor's name", _LONGEST_NAME)
    what = f"the tensor {name}"
    rank = cursor.number("I", what)
    if not 1 <= rank <= _MOST_DIMENSIONS:
        raise ValueError(f"{what}: expected 1 to {_MOST_DIMENSIONS} dimensions, got {rank:,}")
    shape = cursor.numbers("Q", rank, what)
    return TensorInfo(name, tuple(reversed(shape)), cursor.number("I", what), cursor.number("Q", what))


def _short(text: str, longest: int = 200) -> str:
    return text if len(text) <= longest else f"{text[:longest]}..."
