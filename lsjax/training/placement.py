"""Data-parallel training: where parameters and rows lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lsjax.params import Params
from lsjax.training.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Placement:
    """Parameters lie on every device, and rows are split between them.

    Attributes:
        replicated: of parameters and all that is not rows.
        rows: of what begins with an axis of rows.
    """

    replicated: NamedSharding
    rows: NamedSharding

    def like(self, make: Callable[..., Any], *args: Any) -> Any:
        """Shapes of what a function would return for arguments of such shapes, on every device."""
        found = jax.eval_shape(make, *args)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self.replicated), found)


def place(recipe: Recipe, devices: Sequence[Any]) -> Placement:
    """Where the arrays of a training lie.

    Raises:
        ValueError: a step's rows cannot be shared evenly, or there are devices of other processes.
    """
    if jax.process_count() > 1:
        raise ValueError(f"expected one process that has all devices, got {jax.process_count()} processes")
    if recipe.batch_size // recipe.accumulation % len(devices):
        parts = f" in {recipe.accumulation} parts" if recipe.accumulation > 1 else ""
        raise ValueError(
            f"batch_size: expected rows that {len(devices)} devices share evenly, got {recipe.batch_size}{parts}"
        )
    mesh = Mesh(np.array(devices), ("data",))  # of automatic axes: XLA places what lies between the arrays
    return Placement(NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data")))


def on_one_device(params: Params) -> Params:
    """Replicated parameters as they lie on the first device; nothing is copied."""
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), params)
