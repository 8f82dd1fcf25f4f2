"""Headers of a safetensors checkpoint, in one file or in shards with an index, as transformers lays them out."""

from __future__ import annotations

import functools
from pathlib import Path

from safetensors import SafetensorError, safe_open

from lsjax.convert.assemble import Listing, Stored
from lsjax.convert.files import parse_file, parse_json, trouble


def list_tensors(directory: Path, stem: str) -> Listing:
    """What ``{stem}.safetensors`` holds, or the shards that ``{stem}.safetensors.index.json`` names.

    A single file wins over an index beside it, as in transformers. No data is read; problems are listed, not raised.
    """
    single, index = directory / f"{stem}.safetensors", directory / f"{stem}.safetensors.index.json"
    if single.is_file() or not index.is_file():
        found, problems = _read_header(single)
        return Listing(tuple(found), tuple(problems))
    placed, problems = _read_index(index)
    shards: dict[str, set[str]] = {}
    for name, shard in placed.items():
        shards.setdefault(shard, set()).add(name)
    tensors: list[Stored] = []
    lost: set[str] = set()
    for shard, names in sorted(shards.items()):
        found, problem = _read_header(directory / shard)
        held = {tensor.name for tensor in found}
        if found:
            problem += [f"missing: {name}, which {index.name} places in {shard}" for name in sorted(names - held)]
            problem += [f"unexpected: {name} in {shard}, not in {index.name}" for name in sorted(held - placed.keys())]
        else:
            problem = [f"{line}; it should hold {', '.join(sorted(names))}" for line in problem]
        problems += problem
        lost |= names ^ held
        tensors += [tensor for tensor in found if tensor.name in placed]
    return Listing(tuple(tensors), tuple(problems), frozenset(lost))


def _read_index(index: Path) -> tuple[dict[str, str], list[str]]:
    """Tensor names to the shards that hold them, and what is wrong with the index."""
    try:
        content, repeated = parse_file(index)
    except ValueError as error:
        return {}, [str(error)]
    placed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(placed, dict) or not placed:
        return {}, [f"wrong index: {index.name}: expected an object weight_map from tensor names to file names"]
    problems = [f"twice: {name} in {index.name}" for name in repeated]
    outside = [name for name, shard in placed.items() if not _is_file_name(shard)]
    problems += [f"wrong index: {index.name}: {name}: expected a file name, got {placed[name]!r}" for name in outside]
    return {name: shard for name, shard in placed.items() if name not in set(outside)}, problems


def _is_file_name(value: object) -> bool:
    """Whether a shard's name stays in the index's own directory (a file there may still be a link, as in hub caches)."""
    return isinstance(value, str) and value.strip(". ") != "" and not set(value) & set("/\\\0")


def _read_header(path: Path) -> tuple[list[Stored], list[str]]:
    """The tensors of one file, and what is wrong with it; safetensors checks that offsets and sizes fit the file."""
    if problem := trouble(path):
        return [], [problem]
    try:
        # The file stays mapped as long as one of its tensors may be read.
        file = safe_open(path, framework="numpy")
        found = []
        for name in list(file.keys()):
            header = file.get_slice(name)
            read = functools.partial(file.get_tensor, name)
            found.append(Stored(name, tuple(header.get_shape()), header.get_dtype(), path.name, read))
        with path.open("rb") as raw:
            _, repeated = parse_json(raw.read(int.from_bytes(raw.read(8), "little")))
    except (SafetensorError, OSError, ValueError) as error:
        return [], [f"truncated or altered: {path.name} ({path.stat().st_size:,} bytes): {error}"]
    if not found:
        return [], [f"empty: {path.name} holds no tensors"]
    return found, [f"twice: {name} in {path.name}" for name in repeated]
