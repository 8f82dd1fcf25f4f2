"""Opens a checkpoint, whatever its format."""

from __future__ import annotations

from pathlib import Path

from lsjax.convert import flax, gguf, huggingface, pytorch
from lsjax.convert.checkpoint import Checkpoint, CheckpointError
from lsjax.convert.files import is_there


def open_checkpoint(path: Path) -> Checkpoint:
    """What the headers of a checkpoint say; no weight is read.

    Args:
        path: a ``.gguf`` file, or a directory. In a directory ``model.safetensors.index.json`` decides which files
            hold the model, even where ``model.safetensors`` lies beside it (transformers would read that one); without
            an index it is ``model.safetensors``. Only where neither is there, ``pytorch_model.bin.index.json`` or
            ``pytorch_model.bin`` counts, in this order. ``params.safetensors`` or its index is what lsjax writes.

    Raises:
        CheckpointError: no weights there, weights that lsjax wrote beside others, or a file that is no GGUF. What
            else is wrong is told by the checkpoint and by its plan.
        ImportError: a package that the format needs is not installed.
    """
    if path.is_file():
        return gguf.describe(path)
    found = [module for module in (huggingface, pytorch, flax) if _has_weights(path, module.WEIGHTS)]
    if flax in found and len(found) > 1:
        names = " and ".join(module.WEIGHTS for module in found)
        raise CheckpointError(path, [f"expected one checkpoint, got {len(found)}: {names}"])
    if not found:
        there = ", ".join(sorted(entry.name for entry in path.iterdir())) or "nothing"
        wanted = f"{huggingface.WEIGHTS} or its index, {pytorch.WEIGHTS} or its index, or {flax.WEIGHTS} of lsjax.save"
        raise CheckpointError(path, [f"absent: expected {wanted}, found {there}"])
    return found[0].describe(path)


def _has_weights(directory: Path, weights: str) -> bool:
    return any(is_there(directory / f"{weights}{suffix}") for suffix in ("", ".index.json"))
