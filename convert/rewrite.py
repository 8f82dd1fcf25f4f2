"""From one format to another: a checkpoint's tensors and configuration written anew, one tensor in memory at a time."""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from lsjax.config import LlamaConfig
from lsjax.convert import flax, huggingface
from lsjax.convert.checkpoint import DTYPES, Checkpoint, CheckpointError
from lsjax.convert.names import Target, Transform, source_shape, to_flax_layout
from lsjax.convert.plan import Step, checked_plan
from lsjax.convert.writer import Output, Shard, split, write_json, write_weights

TARGETS: dict[Literal["flax", "hf"], Target] = {"flax": flax.TARGET, "hf": huggingface.TARGET}


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """What will be written of a checkpoint that was found to be whole.

    Attributes:
        checkpoint: the source.
        target: the format.
        dtype: of all weights; None: each as stored.
        steps: the tensors, by their names in the target.
        shards: the files.
    """

    checkpoint: Checkpoint
    target: Target
    dtype: np.dtype | None
    steps: dict[str, Step]
    shards: tuple[Shard, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all the weights that are to be written."""
        return sum(output.num_bytes for shard in self.shards for output in shard.outputs)


def plan_rewrite(checkpoint: Checkpoint, target: Target, dtype: np.dtype | None, shard_bytes: int) -> Rewrite:
    """What converting a checkpoint would write.

    Raises:
        CheckpointError: as of ``assemble``, all that can be told before the weights are read.
    """
    config, steps = checked_plan(checkpoint)
    named = {target.table.from_flax(step.path)[0]: step for step in steps}
    outputs = []
    for name, step in named.items():
        _, transform = target.table.from_flax(step.path)
        shape = source_shape(transform, source_shape(step.transform, step.tensor.shape))
        read = functools.partial(_read, step, transform, config)
        outputs.append(Output(name, shape, dtype or DTYPES[step.tensor.dtype], read))
    return Rewrite(checkpoint, target, dtype, named, split(outputs, target.weights, shard_bytes))


def _read(step: Step, transform: Transform, config: LlamaConfig) -> np.ndarray:
    array = to_flax_layout(step.transform, step.tensor.read(), config)
    return array.T if transform == "transpose" else array


def write_rewrite(rewrite: Rewrite, directory: Path, progress: bool | None = None) -> None:
    """Writes the weights; ``directory`` already holds all the other files.

    Raises:
        CheckpointError: weights that the dtype cannot hold, each by name.
        OSError: too little space, or what else the system says.
    """
    free = shutil.disk_usage(directory).free
    if free < rewrite.num_bytes:
        raise OSError(errno.ENOSPC, f"expected {rewrite.num_bytes:,} bytes of free space, got {free:,}")
    shown = None if progress is None else not progress
    from tqdm import tqdm  # here, since decoding alone needs only JAX's own packages

    with tqdm(total=rewrite.num_bytes, unit="B", unit_scale=True, desc="Converting", disable=shown, leave=False) as bar:
        metadata = {"format": rewrite.target.format}
        overflowed = write_weights(directory, rewrite.shards, rewrite.target.weights, metadata, bar.update)
    if overflowed and rewrite.dtype is not None:
        problems = [rewrite.steps[name].out_of_range(rewrite.dtype) for name in overflowed]
        raise CheckpointError(rewrite.checkpoint.where, problems)


def write_configs(rewrite: Rewrite, directory: Path) -> None:
    """Carries ``config.json`` and ``generation_config.json`` over, with all their entries; only a new dtype is noted.

    A GGUF file has neither: both are made from its metadata.
    """
    checkpoint = rewrite.checkpoint
    if checkpoint.format == "gguf" and checkpoint.config is not None:
        flax.write_config(checkpoint.config, rewrite.dtype or np.dtype(np.float32), directory)
        return
    copy_files(checkpoint.where, directory, ("config.json", "generation_config.json"))
    if rewrite.dtype is not None:
        entries = json.loads((directory / "config.json").read_bytes())
        # transformers 5 says dtype, transformers 4 says torch_dtype
        said = [name for name in ("dtype", "torch_dtype") if name in entries] or ["dtype"]
        write_json(directory / "config.json", entries | dict.fromkeys(said, str(rewrite.dtype)))


def copy_files(source: Path, directory: Path, names: Sequence[str]) -> list[str]:
    """Copies those files that are there, byte for byte; returns their names."""
    found = [name for name in names if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, directory / name)
    return found
