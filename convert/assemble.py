"""Fills a model's parameters from a list of stored tensors: everything is checked first, then read one by one."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from tqdm import tqdm

from lsjax.config import LlamaConfig
from lsjax.convert.names import Table, Transform, source_shape, to_flax_layout
from lsjax.params import Params, abstract_tree, flatten, unflatten

# safetensors' names of the dtypes that weights may be stored in.
DTYPES = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}

_SKELETON_LAYERS = 200  # a skeleton deeper than this is only built for a checkpoint that could fill it


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded.

    Attributes:
        problems: one line for everything that is wrong with it.
    """

    def __init__(self, where: object, problems: Iterable[str]) -> None:
        self.problems = tuple(map(_one_line, problems))
        super().__init__(f"cannot load {where}:\n  " + "\n  ".join(self.problems))


def _one_line(problem: str, longest: int = 2000) -> str:
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
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    where: str
    read: Callable[[], np.ndarray]


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


def assemble(
    where: object,
    config: LlamaConfig,
    listing: Listing,
    table: Table,
    dtype: Any = None,
    progress: bool | None = None,
) -> Params:
    """The parameters that a checkpoint holds; beyond them, one tensor at a time is in memory.

    Args:
        where: what is being loaded, for messages.
        config: what the checkpoint must fit.
        listing: its tensors.
        table: its format's names.
        dtype: a floating dtype for all arrays; None keeps each as stored (float64 as JAX holds it).
        progress: whether to show a bar; None: on a terminal.

    Raises:
        CheckpointError: names every missing, unexpected, twice-set or wrongly shaped tensor, every tensor that is not
            floating-point, what the listing complains of; or a copy of a tied head that differs from the embedding,
            or weights that ``dtype`` cannot hold. Nothing is returned in part.
    """
    if listing.problems and not listing.tensors:
        raise CheckpointError(where, listing.problems)  # nothing could be read, so everything else would be missing
    if config.num_hidden_layers > max(_SKELETON_LAYERS, len(listing.tensors) + len(listing.lost)):
        few = f"{config.num_hidden_layers} layers in the configuration, {len(listing.tensors)} tensors in the files"
        raise CheckpointError(where, [*listing.problems, few])
    plan, tied, problems = _plan(config, listing, table)
    if problems:
        raise CheckpointError(where, problems)
    if tied is not None:
        embedding = next(tensor for tensor, path, _ in plan if path == "embed_tokens/embedding")
        if embedding.dtype != tied.dtype or _digest(embedding) != _digest(tied):
            head = f"{tied.name} differs from {embedding.name}"
            raise CheckpointError(where, [f"unexpected: {head}, although tie_word_embeddings is true"])

    leaves = {}
    total = sum(_num_bytes(tensor) for tensor, _, _ in plan)
    shown = None if progress is None else not progress
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=shown, leave=False) as bar:
        for tensor, path, transform in plan:
            array, overflows = _read(tensor, transform, config, dtype)
            if overflows:
                numbers = f"holds numbers beyond the range of {array.dtype}"
                problems.append(f"out of range: {tensor.name} in {tensor.where} {numbers}")
            leaves[path] = jax.device_put(array)
            del array  # before the next one is read
            bar.update(_num_bytes(tensor))
    if problems:
        raise CheckpointError(where, problems)
    return Params(config, unflatten(leaves))


def _plan(
    config: LlamaConfig, listing: Listing, table: Table
) -> tuple[list[tuple[Stored, str, Transform]], Stored | None, list[str]]:
    """What to read, with the Flax path and transform of each; a stored copy of a tied head; and all problems."""
    skeleton = flatten(abstract_tree(config))
    plan: dict[str, tuple[Stored, str, Transform]] = {}
    tied = None
    problems = list(listing.problems)
    for tensor in listing.tensors:
        if table.is_ignored(tensor.name):
            continue
        path, transform = table.to_flax(tensor.name) or ("", "keep")
        is_tied_head = path == "lm_head/kernel" and config.tie_word_embeddings
        like = skeleton.get("embed_tokens/embedding" if is_tied_head else path)
        if like is None:
            problems.append(f"unexpected: {tensor.name} {list(tensor.shape)} in {tensor.where}")
            continue
        first = tied if is_tied_head else plan.get(path, (None,))[0]
        if first is not None:
            problems.append(f"twice: {tensor.name} in {tensor.where} and {first.name} in {first.where}")
            continue
        expected = source_shape("keep" if is_tied_head else transform, like.shape)
        if tensor.shape != expected:
            problems.append(
                f"wrong shape: {tensor.name} in {tensor.where}: expected {list(expected)}, got {list(tensor.shape)}"
            )
        if tensor.dtype not in DTYPES:
            wanted = ", ".join(DTYPES)
            problems.append(f"wrong dtype: {tensor.name} in {tensor.where}: expected {wanted}, got {tensor.dtype}")
        if is_tied_head:
            tied = tensor
        else:
            plan[path] = tensor, path, transform
    for path in sorted(skeleton.keys() - plan.keys(), key=_natural):
        name, transform = table.from_flax(path)
        if name not in listing.lost:
            problems.append(f"missing: {name} {list(source_shape(transform, skeleton[path].shape))}")
    return list(plan.values()), tied, problems


def _natural(path: str) -> list[tuple[int, str]]:
    """A sorting key that puts ``layers_2`` before ``layers_10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.replace("/", "_").split("_")]


def _num_bytes(tensor: Stored) -> int:
    return math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize


def _digest(tensor: Stored) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tensor.read()).view(np.uint8).data).digest()


def _read(tensor: Stored, transform: Transform, config: LlamaConfig, dtype: Any) -> tuple[np.ndarray, bool]:
    """One tensor in Flax's layout, and whether a finite number of it became infinite."""
    stored = tensor.read()
    # Without x64 JAX would warn of a float64 array and round it.
    target = jax.dtypes.canonicalize_dtype(stored.dtype if dtype is None else dtype)
    array = _copy(to_flax_layout(transform, stored, config), target)
    narrows = ml_dtypes.finfo(target).max < ml_dtypes.finfo(stored.dtype).max
    return array, bool(narrows and np.isinf(array).sum() > np.isinf(stored).sum())


def _copy(view: np.ndarray, dtype: np.dtype, block: int = 64) -> np.ndarray:
    """A contiguous copy in ``dtype``; in blocks, which transposes four times as fast as one assignment."""
    copied = np.empty(view.shape, dtype)
    with np.errstate(over="ignore"):  # the caller looks for infinities
        if view.ndim < 2 or view.flags.c_contiguous:
            copied[...] = view
        else:
            for start in range(0, view.shape[1], block):
                copied[:, start : start + block] = view[:, start : start + block]
    return copied


def check_dtype(dtype: Any) -> np.dtype | None:
    """``dtype`` as one that weights can be loaded in, or None.

    Raises:
        ValueError: not a floating dtype of 16 bits or more, or one that JAX is not set to hold.
    """
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in DTYPES.values() or jax.dtypes.canonicalize_dtype(found) != found:
        names = "bfloat16, float16 or float32 (float64 with jax_enable_x64)"
        raise ValueError(f"dtype: expected {names}, got {dtype!r}")
    return found
