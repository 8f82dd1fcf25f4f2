"""Files of a checkpoint before anything is believed of them: absent, no file, a pointer, no JSON, a key twice."""

from __future__ import annotations

import collections
import json
import re
import stat
from pathlib import Path
from typing import Any

from lsjax.convert.checkpoint import CheckpointError

_LFS = b"version https://git-lfs.github.com/spec/"  # how a git-lfs pointer begins
_JSON_BYTES = 100_000_000  # as many as safetensors allows a header
_JSON_DEPTH = 64
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def is_there(path: Path) -> bool:
    """Whether a directory has an entry of this name, whatever it is; a link to nothing is one."""
    return path.is_symlink() or path.exists()


def trouble(path: Path) -> str | None:
    """Why a file's contents cannot be looked at, in one line, or None; links are followed, as the hub's cache has them.

    Nothing but a regular file is opened, so that a FIFO does not wait for a writer.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            return f"not a file: {path.name} is {_KINDS.get(stat.S_IFMT(mode), 'something else')}"
        with path.open("rb") as file:
            start = file.read(1024)
    except (FileNotFoundError, NotADirectoryError):
        return f"absent: {path.name}" + (" is a link to nothing" if path.is_symlink() else "")
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        return f"cannot be read: {path.name}: {getattr(error, 'strerror', None) or error}"
    if not start:
        return f"empty: {path.name} (0 bytes)"
    if start.startswith(_LFS):
        size = re.search(rb"^size (\d{1,18})$", start, re.MULTILINE)
        of = f" of {int(size[1]):,} bytes" if size else ""
        return f"git-lfs pointer: {path.name} only names contents{of}: run `git lfs pull` in the clone"
    return None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: the file cannot be read, or is no JSON object, or one of its objects has a key twice.
    """
    try:
        value, repeated = parse_file(path)
    except ValueError as error:
        raise CheckpointError(path.parent, [str(error)]) from error
    if not isinstance(value, dict):
        raise CheckpointError(path.parent, [f"{path.name}: expected a JSON object, got {type(value).__name__}"])
    if repeated:
        raise CheckpointError(path.parent, [f"twice: {key} in {path.name}" for key in repeated])
    return value


def parse_file(path: Path) -> tuple[Any, list[str]]:
    """As :func:`parse_json`, of a file.

    Raises:
        ValueError: what is wrong with it, in one line that names it.
    """
    if problem := trouble(path):
        raise ValueError(problem)
    if path.stat().st_size > _JSON_BYTES:
        raise ValueError(f"too large: {path.name}: expected at most {_JSON_BYTES:,} bytes, got {path.stat().st_size:,}")
    try:
        return parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"not JSON: {path.name}: {error}") from error


def parse_json(data: bytes) -> tuple[Any, list[str]]:
    """A JSON value, and the keys that stand twice in one object (the last would win).

    Raises:
        ValueError: not JSON in UTF-8; NaN or Infinity, which are no JSON; nested deeper than any checkpoint's.
    """
    repeated: list[str] = []

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = collections.Counter(key for key, _ in pairs)
        repeated.extend(key for key, count in counts.items() if count > 1)
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"expected numbers, got {constant}")

    too_deep = f"expected at most {_JSON_DEPTH} levels, got more"
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=make, parse_constant=refuse)
    except RecursionError:
        raise ValueError(too_deep) from None
    if _is_deeper(value, _JSON_DEPTH):
        raise ValueError(too_deep)
    return value, repeated


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether objects and arrays are nested in more than so many levels."""
    nodes = [value]
    for _ in range(levels + 1):
        nested = [node.values() if isinstance(node, dict) else node for node in nodes if isinstance(node, dict | list)]
        nodes = [child for children in nested for child in children]
    return bool(nodes)
