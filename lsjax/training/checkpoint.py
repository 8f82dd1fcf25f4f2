"""Checkpoints of a training, kept by orbax: the last one, from which it goes on, and the best one."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from lsjax.checks import check_choice
from lsjax.params import Params
from lsjax.training.recipe import TrainState
from lsjax.training.record import CHECKPOINTS, read_config

WHICH = ("last", "best")


class Checkpoints:
    """The states of one training in a directory; each appears whole or not at all, even if the process is killed.

    Args:
        directory: of the training.
    """

    def __init__(self, directory: Path, *, read_only: bool = False) -> None:
        keep: list[policies.PreservationPolicy] = [
            policies.LatestN(1),
            policies.BestN(get_metric_fn=_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False),
        ]
        options = ocp.CheckpointManagerOptions(
            best_fn=_loss,
            best_mode="min",
            preservation_policy=None if read_only else policies.AnyPreservationPolicy(keep),
            cleanup_tmp_directories=not read_only,
            read_only=read_only,
            # On a CPU the next step, which is given this state's memory, would write into what is being saved.
            enable_async_checkpointing=False,
        )
        self._manager = ocp.CheckpointManager(directory.absolute() / CHECKPOINTS, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    @property
    def last_step(self) -> int | None:
        """The step of the last state; None: there is none."""
        return self._manager.latest_step()

    @property
    def best_step(self) -> int | None:
        """The step of the state with the least held-out loss; None: there is none."""
        return self._manager.best_step()

    def save(self, state: TrainState, held_out_loss: float = math.inf) -> None:
        """Keeps a state; those that are neither the last nor the best any more go.

        Args:
            state: concrete.
            held_out_loss: what the best is chosen by; infinite where it was not looked at.
        """
        parts = ocp.args.Composite(
            params=ocp.args.StandardSave(state.params.tree), optimizer=ocp.args.StandardSave(_rest(state))
        )
        self._manager.save(int(state.step), args=parts, metrics={"held_out_loss": held_out_loss})

    def restore(self, like: TrainState) -> TrainState:
        """The last state.

        Args:
            like: shapes with shardings.

        Raises:
            FileNotFoundError: there is none.
        """
        parts = ocp.args.Composite(
            params=ocp.args.StandardRestore(like.params.tree), optimizer=ocp.args.StandardRestore(_rest(like))
        )
        found = self._manager.restore(self._manager.latest_step(), args=parts)
        params = like.params.tree_unflatten(like.params.config, (found["params"],))
        return TrainState(params=params, **found["optimizer"])

    def restore_params(self, step: int, like: Params) -> Params:
        """The parameters of a state alone, placed as ``like`` says."""
        parts = ocp.args.Composite(params=ocp.args.StandardRestore(like.tree))
        return like.tree_unflatten(like.config, (self._manager.restore(step, args=parts)["params"],))


def _loss(metrics: dict[str, Any]) -> float:
    return metrics["held_out_loss"]


def _rest(state: TrainState) -> dict[str, Any]:
    return {"step": state.step, "opt_state": state.opt_state}


def load_trained(directory: str | os.PathLike[str], which: str = "best") -> Params:
    """The parameters of a training, float32, on JAX's default device.

    Args:
        directory: of the training, as :func:`~lsjax.training.loop.train` was given it.
        which: ``"best"``: with the least held-out loss; ``"last"``.

    Raises:
        FileNotFoundError: no training, or none that has come to its first checkpoint.

    Example:
        >>> params = lsjax.training.load_trained("runs/small")
    """
    check_choice("which", which, WHICH)
    directory = Path(directory).expanduser()
    config = read_config(directory)
    with Checkpoints(directory, read_only=True) as kept:
        step = kept.last_step if which == "last" else kept.best_step
        if step is None:
            raise FileNotFoundError(f"{directory}: expected a training with a checkpoint, found none yet")
        place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), Params.abstract(config)
        )
        return kept.restore_params(step, like)
