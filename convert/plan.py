"""What to read of a checkpoint, and how: every tensor matched with the model's, all problems found from headers."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from lsjax.config import LlamaConfig
from lsjax.convert.checkpoint import DTYPES, Checkpoint, CheckpointError, Stored
from lsjax.convert.names import Transform, source_shape
from lsjax.model.shapes import parameter_shapes

_SKELETON_LAYERS = 200  # a skeleton deeper than this is only built for a checkpoint that could fill it


@dataclasses.dataclass(frozen=True)
class Step:
    """One stored tensor, the Flax path that it belongs to, and how to bring it into Flax's layout."""

    tensor: Stored
    path: str
    transform: Transform

    def out_of_range(self, dtype: np.dtype) -> str:
        """The problem of a tensor that a dtype cannot hold."""
        return f"out of range: {self.tensor.name} in {self.tensor.where} holds numbers beyond the range of {dtype}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a checkpoint fills a model.

    Attributes:
        steps: every tensor that the model takes, in the order of the listing.
        tied: a stored copy of a head that is tied to the embedding.
        ignored: tensors that are passed over, since they hold nothing of the model.
        problems: why the checkpoint cannot be loaded, one line each; what only the data tells is not among them.
    """

    steps: tuple[Step, ...] = ()
    tied: Stored | None = None
    ignored: tuple[Stored, ...] = ()
    problems: tuple[str, ...] = ()


def make_plan(checkpoint: Checkpoint) -> Plan:
    """The plan of a checkpoint, with everything that is missing, unexpected, twice, wrongly shaped or typed.

    No data is read, and nothing is raised.
    """
    listing, config = checkpoint.listing, checkpoint.config
    if config is None:
        return Plan(problems=(*checkpoint.problems, *listing.problems))
    if listing.problems and not listing.tensors:
        return Plan(problems=listing.problems)  # nothing could be read, so everything else would be missing
    if config.num_hidden_layers > max(_SKELETON_LAYERS, len(listing.tensors) + len(listing.lost)):
        few = f"{config.num_hidden_layers} layers in the configuration, {len(listing.tensors)} tensors in the files"
        return Plan(problems=(*listing.problems, few))
    skeleton = parameter_shapes(config)
    steps: dict[str, Step] = {}
    tied = None
    ignored: list[Stored] = []
    problems = list(listing.problems)
    for tensor in listing.tensors:
        if checkpoint.table.is_ignored(tensor.name):
            ignored.append(tensor)
            continue
        path, transform = checkpoint.table.to_flax(tensor.name) or ("", "keep")
        is_tied_head = path == "lm_head/kernel" and config.tie_word_embeddings
        shape = skeleton.get("embed_tokens/embedding" if is_tied_head else path)
        if shape is None:
            problems.append(f"unexpected: {tensor.name} {list(tensor.shape)} in {tensor.where}")
            continue
        first = tied if is_tied_head else steps[path].tensor if path in steps else None
        if first is not None:
            problems.append(f"twice: {tensor.name} in {tensor.where} and {first.name} in {first.where}")
            continue
        expected = source_shape("keep" if is_tied_head else transform, shape)
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
            steps[path] = Step(tensor, path, transform)
    for path in sorted(skeleton.keys() - steps.keys(), key=_natural):
        name, transform = checkpoint.table.from_flax(path)
        if name not in listing.lost:
            problems.append(f"missing: {name} {list(source_shape(transform, skeleton[path]))}")
    return Plan(tuple(steps.values()), tied, tuple(ignored), tuple(problems))


def checked_plan(checkpoint: Checkpoint) -> tuple[LlamaConfig, tuple[Step, ...]]:
    """The configuration and the steps of a checkpoint that can be loaded.

    A stored copy of a tied head is read, and must be the embedding.

    Raises:
        CheckpointError: all problems of the plan, or the copy that differs.
    """
    plan = make_plan(checkpoint)
    if plan.problems or checkpoint.config is None:
        raise CheckpointError(checkpoint.where, plan.problems)
    if plan.tied is not None:
        embedding = next(step.tensor for step in plan.steps if step.path == "embed_tokens/embedding")
        if embedding.dtype != plan.tied.dtype or _digest(embedding) != _digest(plan.tied):
            head = f"{plan.tied.name} differs from {embedding.name}"
            raise CheckpointError(checkpoint.where, [f"unexpected: {head}, although tie_word_embeddings is true"])
    return checkpoint.config, plan.steps


def _natural(path: str) -> list[tuple[int, str]]:
    """A sorting key that puts ``layers_2`` before ``layers_10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in path.replace("/", "_").split("_")]


def _digest(tensor: Stored) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(tensor.read()).view(np.uint8).data).digest()
