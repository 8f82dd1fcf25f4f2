"""Opens a checkpoint, whatever its format."""

from __future__ import annotations

from pathlib import Path

from lsjax.convert import flax, gguf, huggingface
from lsjax.convert.checkpoint import Checkpoint, CheckpointError
from lsjax.convert.files import is_there


def open_checkpoint(path: Path) -> Checkpoint:
    """What the headers of a checkpoint say; no weight is read.

    Args:
        path: a ``.gguf`` file, or a directory. In a directory ``model.safetensors.index.json`` decides which files
            hold the model, even where ``model.safetensors`` lies beside it (transformers would read that one); without
            an index it is ``model.safetensors``. ``params.safetensors`` and its index are what ``lsjax.save`` writes.

    Raises:
        CheckpointError: no weights there, weights of ``lsjax.save`` beside others, or a file that is no GGUF. What
            else is wrong is told by the checkpoint and by its plan.
        ImportError: a package that the format needs is not installed.
    """
    if path.is_file():
        return gguf.describe(path)
    found = [module for module in (huggingface, flax) if _has_weights(path, module.WEIGHTS)]
    if len(found) > 1:
        names = " and ".join(module.WEIGHTS for module in found)
        raise CheckpointError(path, [f"expected one checkpoint, got two: {names}"])
    if not found:
        there = ", ".join(sorted(entry.name for entry in path.iterdir())) or "nothing"
        wanted = "model.safetensors or model.safetensors.index.json (or params.safetensors, which lsjax.save writes)"
        raise CheckpointError(path, [f"absent: expected {wanted}, found {there}"])
    return found[0].describe(path)


def _has_weights(directory: Path, weights: str) -> bool:
    return any(is_there(directory / f"{weights}{suffix}") for suffix in ("", ".index.json"))
