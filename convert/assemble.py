"""Fills a model's parameters from a checkpoint: everything is checked first, then read tensor by tensor."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from lsjax.config import LlamaConfig
from lsjax.convert.cast import cast
from lsjax.convert.checkpoint import Checkpoint, CheckpointError
from lsjax.convert.names import to_flax_layout
from lsjax.convert.plan import Step, checked_plan
from lsjax.params import Params, unflatten


def assemble(checkpoint: Checkpoint, dtype: Any = None, progress: bool | None = None) -> Params:
    """The parameters that a checkpoint holds; beyond them, one tensor at a time is in memory.

    Args:
        checkpoint: what is known from its headers.
        dtype: a floating dtype for all arrays; None keeps each as stored (float64 as JAX holds it).
        progress: whether to show a bar; None: on a terminal.

    Raises:
        CheckpointError: names every missing, unexpected, twice-set or wrongly shaped tensor, every tensor that is not
            floating-point, what is wrong with the configuration and the files; or a copy of a tied head that differs
            from the embedding, or weights that ``dtype`` cannot hold. Nothing is returned in part.
    """
    config, steps = checked_plan(checkpoint)
    leaves, problems = {}, []
    total = sum(step.tensor.num_bytes for step in steps)
    shown = None if progress is None else not progress
    from tqdm import tqdm  # here, since decoding alone needs only JAX's own packages

    before = None
    with tqdm(total=total, unit="B", unit_scale=True, desc="Loading", disable=shown, leave=False) as bar:
        for step in steps:
            array, overflows = _read(step, config, dtype)
            if overflows:
                problems.append(step.out_of_range(array.dtype))
            # A copy: the array may be a part of the file, which is let go one tensor later.
            leaves[step.path] = jax.device_put(array, may_alias=False)
            jax.block_until_ready(before)
            before = leaves[step.path]
            del array
            bar.update(step.tensor.num_bytes)
    jax.block_until_ready(before)
    if problems:
        raise CheckpointError(checkpoint.where, problems)
    return Params(config, unflatten(leaves))


def _read(step: Step, config: LlamaConfig, dtype: Any) -> tuple[np.ndarray, bool]:
    """One tensor in Flax's layout, and whether a finite number of it became infinite."""
    stored = step.tensor.read()
    # Without x64 JAX would warn of a float64 array and round it.
    target = jax.dtypes.canonicalize_dtype(stored.dtype if dtype is None else dtype)
    return cast(to_flax_layout(step.transform, stored, config), target)
