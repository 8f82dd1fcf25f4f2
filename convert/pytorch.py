"""PyTorch's ``.bin`` files, in one file or in shards with an index: the only format that needs torch.

torch reads the pickle with ``weights_only=True``, so that it can build tensors and run nothing, and onto the device
``meta``, which has no data. It tells where in the file each tensor lies; from there they are read without torch.
"""

from __future__ import annotations

import bisect
import functools
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from lsjax.convert.checkpoint import DTYPES, Checkpoint, Stored, read_array
from lsjax.convert.files import trouble
from lsjax.convert.huggingface import with_config
from lsjax.convert.names import HUGGINGFACE
from lsjax.convert.shards import list_tensors

WEIGHTS = "pytorch_model.bin"  # or the shards that an index of this name places

_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64"}
_OLDEST = (2, 6)  # before, weights_only could be made to run code (CVE-2025-32434)


def describe(directory: Path) -> Checkpoint:
    """The checkpoint of ``pytorch_model.bin``, or of ``pytorch_model.bin.index.json`` and its shards.

    Files of the format before torch 1.6, which are no zip archives, are read whole, one at a time.

    Raises:
        ImportError: torch is not installed, or too old to refuse code.
    """
    torch = _import_torch()

    @functools.lru_cache(maxsize=1)  # one whole file in memory
    def load_whole(path: Path) -> dict[str, Any]:
        return torch.load(path, map_location="cpu", weights_only=True)

    read_header = functools.partial(_read_header, torch, load_whole)
    return with_config(directory, "pytorch", HUGGINGFACE, list_tensors(directory, WEIGHTS, read_header))


def _import_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "PyTorch's .bin files are read through torch: pip install 'lsjax[torch]', or take a safetensors checkpoint"
        ) from error
    if tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) < _OLDEST:
        raise ImportError(
            f"PyTorch's .bin files need torch 2.6 or newer, got {torch.__version__}: older ones could run code"
        )
    return torch


def _read_header(torch: Any, load_whole: Any, path: Path) -> tuple[list[Stored], list[str]]:
    """The tensors of one file, and what is wrong with it."""
    if problem := trouble(path):
        return [], [problem]
    try:
        records = _records(path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected pickle protocol")  # other than torch's own; read or refused
            state = torch.load(path, map_location="meta", weights_only=True, mmap=records is not None)
    except OSError as error:
        return [], [f"unreadable: {path.name}: {error}"]
    except Exception as error:  # torch raises whatever it meets in a damaged file
        return [], [f"refused: {path.name} ({path.stat().st_size:,} bytes): {_reason(error)}"]
    if not isinstance(state, dict) or not state:
        return [], [f"wrong contents: {path.name}: expected a dictionary of tensors, got {type(state).__name__}"]
    found, problems = [], []
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            problems.append(f"unexpected: {name} in {path.name}: expected a tensor, got {type(value).__name__}")
            continue
        shape, kind = tuple(value.shape), str(value.dtype).removeprefix("torch.")
        dtype = _DTYPES.get(kind, kind) if value.layout == torch.strided and not value.is_neg() else "no plain array"
        if dtype not in DTYPES:
            read = functools.partial(np.zeros, shape, np.uint8)  # a wrong dtype, which is never read
        elif records is None:
            read = functools.partial(_from_torch, torch, load_whole, path, name, DTYPES[dtype])
        else:
            try:
                read = _reader(value, path, DTYPES[dtype], records)
            except ValueError as error:
                problems.append(f"truncated or altered: {name} in {path.name}: {error}")
                continue
        found.append(Stored(name, shape, dtype, path.name, read, value.numel() * value.element_size()))
    return found, problems


def _records(path: Path) -> list[tuple[int, int]] | None:
    """Where each record of the zip archive starts, and the bytes of its data; None for a file that is no archive."""
    if not zipfile.is_zipfile(path):
        return None
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
    packed = [record.filename for record in records if record.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise ValueError(f"expected records without compression, got {packed[0]} compressed")
    return sorted((record.header_offset, record.file_size) for record in records)


def _reader(tensor: Any, path: Path, dtype: np.dtype, records: list[tuple[int, int]]) -> Any:
    """Reads a tensor that may be a view of a part of a shared storage, in any order of its axes."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    span = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    storage = tensor.untyped_storage()
    skipped = tensor.storage_offset() * dtype.itemsize
    start, room = storage._checkpoint_offset, storage.nbytes()
    record = bisect.bisect(records, (start, 0)) - 1
    if (room and (record < 0 or room > records[record][1])) or skipped + span * dtype.itemsize > room:
        raise ValueError("its storage is larger than what the file holds of it")

    def read() -> np.ndarray:
        flat = read_array(path, start + skipped, (span,), dtype)
        return np.lib.stride_tricks.as_strided(flat, shape, [stride * dtype.itemsize for stride in strides])

    return read


def _from_torch(torch: Any, load_whole: Any, path: Path, name: str, dtype: np.dtype) -> np.ndarray:
    """A tensor of a file that torch has to read as a whole; bit for bit, though NumPy has no bfloat16 for torch."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return load_whole(path)[name].detach().contiguous().view(integers).numpy().view(dtype)


def _reason(error: Exception) -> str:
    """What torch says, in one line and without its advice to switch the protection off."""
    forbidden = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
    if forbidden:
        return f"its pickle wants to call {forbidden[1]}, which could run code; only tensors are read"
    told = str(error).split("WeightsUnpickler error:")[-1]
    lines = [line.strip() for line in told.splitlines() if line.strip() and "weights_only" not in line]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
