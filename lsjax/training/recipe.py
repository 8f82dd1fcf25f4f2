"""The LayerSkip recipe (arXiv 2404.16710) as one pure step: layer dropout, early-exit loss, optax's AdamW."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lsjax.checks import check_choice, check_int, check_params
from lsjax.model.projection import on_cpu
from lsjax.params import Params
from lsjax.training.batch import IGNORED, Batch
from lsjax.training.curriculum import EarlyExitLoss
from lsjax.training.dropout import LayerDropout, draw_kept
from lsjax.training.losses import CHUNK, exit_losses, last_layer_alone, possible_exits
from lsjax.training.optimizer import Optimizer

DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides what a training step computes: frozen and hashable, so static under ``jax.jit``.

    Attributes:
        steps: of the whole training, T; schedules and curricula are stretched over them.
        batch_size: rows that one update sees.
        accumulation: parts in which a batch goes through the model, one after the other, to save memory. The update is
            that of the whole batch: sums are divided by the whole batch's labels, and dropout is drawn for all of it.
        seed: of the order of data and of dropout.
        dtype: what layers and heads compute in; parameters, gradients and the optimizer's state are float32.
        remat: whether reverse mode computes each layer anew from its input; see :func:`compiler_options`.
        loss_chunk: positions of each row whose logits exist at once; 0: all.
        optimizer: AdamW and its schedule.
        layer_dropout: None: every layer runs for every sample.
        early_exit: None: the last layer's loss alone.

    Raises:
        ValueError: says what was expected and what came.
    """

    steps: int
    batch_size: int
    accumulation: int = 1
    seed: int = 0
    dtype: str = "float32"
    remat: bool = False
    loss_chunk: int = CHUNK
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    layer_dropout: LayerDropout | None = None
    early_exit: EarlyExitLoss | None = None

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("batch_size", 1), ("accumulation", 1), ("seed", 0), ("loss_chunk", 0)):
            check_int(name, getattr(self, name), least)
        check_choice("dtype", self.dtype, DTYPES)
        if self.batch_size % self.accumulation:
            raise ValueError(
                f"accumulation: expected a divisor of batch_size {self.batch_size}, got {self.accumulation}"
            )
        if type(self.remat) is not bool:
            raise ValueError(f"remat: expected true or false, got {self.remat!r}")


class TrainState(flax.struct.PyTreeNode):
    """What a step changes.

    Attributes:
        step: int32 ``[]``, steps done.
        params: float32.
        opt_state: optax's.
    """

    step: jax.Array
    params: Params
    opt_state: Any


class Metrics(flax.struct.PyTreeNode):
    """What a step was like; float32 ``[]`` unless said otherwise, all before its update.

    Attributes:
        loss: the exits' cross-entropies by their weights, what is minimised; per label.
        last_loss: the cross-entropy of the last layer's output, per label.
        grad_norm: the global norm of the gradients before clipping.
        learning_rate: of this step.
        labels: int32 ``[]``, positions with a label.
    """

    loss: jax.Array
    last_loss: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    labels: jax.Array


def init_state(recipe: Recipe, params: Params) -> TrainState:
    """The state before the first step, with a copy of the parameters in float32.

    Args:
        recipe: what to train by.
        params: where to start from; ``lsjax.init(config, key)`` or a loaded model.

    Raises:
        ValueError: the recipe freezes what the model has not.
    """
    check_params(params)
    recipe.optimizer.check(params)
    # Copies, since steps are given the state's memory.
    params = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32, copy=True), params)
    return TrainState(jnp.zeros((), jnp.int32), params, recipe.optimizer.transformation(recipe.steps).init(params.tree))


def train_step(recipe: Recipe, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    """One update; pure, to be jitted with ``recipe`` static and the state donated.

    What is random in it follows from the recipe's seed and the state's step alone.

    Args:
        recipe: static.
        state: of :func:`init_state` or an earlier step.
        batch: int32 ``[batch_size, length]``. Without any label the loss and its gradient are 0 (weights still decay,
            and move by what is left of earlier gradients).

    Returns:
        the next state, and what this step was like.

    Example:
        >>> options = lsjax.training.compiler_options(recipe)
        >>> step = jax.jit(lsjax.training.train_step, static_argnums=0, donate_argnums=1, compiler_options=options)
        >>> state = lsjax.training.init_state(recipe, params)
        >>> for number in range(recipe.steps):
        ...     state, metrics = step(recipe, state, rows.batch(number, recipe.batch_size, recipe.seed))
    """
    grads, losses, labels = gradients(recipe, state.params, batch, state.step)
    updates, opt_state = recipe.optimizer.transformation(recipe.steps).update(grads, state.opt_state, state.params.tree)
    tree = optax.apply_updates(state.params.tree, updates)
    params = state.params.tree_unflatten(state.params.config, (tree,))
    metrics = Metrics(
        loss=jnp.vdot(losses, exit_weights(recipe, len(losses), state.step)),
        last_loss=losses[-1],
        grad_norm=optax.tree.norm(grads),
        learning_rate=jnp.asarray(recipe.optimizer.learning_rates(recipe.steps)(state.step), jnp.float32),
        labels=labels,
    )
    return TrainState(state.step + 1, params, opt_state), metrics


def compiler_options(recipe: Recipe) -> dict[str, str]:
    """What ``jax.jit`` of a step is to be given, so that ``remat`` saves memory on every backend.

    XLA's CPU backend removes the barriers behind which layers are computed anew before it joins equal computations, and
    so keeps what was to be dropped.
    """
    return {"xla_disable_hlo_passes": "cse_barrier_expander"} if recipe.remat and on_cpu() else {}


def exit_weights(recipe: Recipe, num_layers: int, step: jax.Array | int) -> jax.Array:
    """float32 ``[layers]``: each exit's weight in the loss at a step, 0 where it is off; their sum is 1."""
    if recipe.early_exit is None:
        return jnp.asarray(last_layer_alone(num_layers))
    return recipe.early_exit.weights(num_layers, step, recipe.steps)


def gradients(
    recipe: Recipe, params: Params, batch: Batch, step: jax.Array | int
) -> tuple[dict[str, Any], jax.Array, jax.Array]:
    """The gradient of the loss over a whole batch, in parts as the recipe has it.

    Args:
        recipe: static.
        params: float32.
        batch: int32 ``[batch_size, length]``.
        step: steps done before, which decides on dropout and exits.

    Returns:
        the gradient, a tree like ``params.tree``; each exit's cross-entropy per label, float32 ``[layers]``, 0 for
        exits that are off; and how many labels there are, int32 ``[]``.
    """
    if batch.tokens.shape[0] != recipe.batch_size:
        raise ValueError(f"batch: expected {recipe.batch_size} rows, got {batch.tokens.shape[0]}")
    layers = params.config.num_hidden_layers
    weights, kept = exit_weights(recipe, layers, step), _kept(recipe, layers, step)
    labels = jnp.sum(batch.labels != IGNORED)
    share = 1 / jnp.maximum(labels, 1)
    possible = possible_exits(recipe.early_exit, layers)

    def loss(tree: dict[str, Any], part: Batch, kept: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        total, losses = exit_losses(
            params.tree_unflatten(params.config, (recipe.optimizer.freeze(tree),)),
            part,
            share * weights,
            possible=possible,
            kept=None if kept is None else kept.T,
            chunk=recipe.loss_chunk or None,
            dtype=jnp.dtype(recipe.dtype),
            remat=recipe.remat,
        )
        return total, share * losses

    differentiate = jax.grad(loss, has_aux=True)
    if recipe.accumulation == 1:
        grads, losses = differentiate(params.tree, batch, kept)
        return grads, losses, labels

    def add(sums: Any, part: tuple[Batch, jax.Array | None]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, differentiate(params.tree, *part)), None

    def split(rows: Any) -> Any:  # every part of rows on each device, where rows are split between devices
        return rows.reshape(-1, recipe.accumulation, *rows.shape[1:]).swapaxes(0, 1)

    zeros = jax.tree.map(jnp.zeros_like, params.tree), jnp.zeros(layers, jnp.float32)
    (grads, losses), _ = lax.scan(add, zeros, jax.tree.map(split, (batch, kept)))
    return grads, losses, labels


def _kept(recipe: Recipe, num_layers: int, step: jax.Array | int) -> jax.Array | None:
    """bool ``[batch_size, layers]``: which layers run for which rows at a step; None: all do."""
    dropout = recipe.layer_dropout
    if dropout is None or not np.any(dropout.depth_rates(num_layers)):
        return None
    key = jax.random.fold_in(jax.random.key(recipe.seed), step)
    return draw_kept(key, dropout.rates(num_layers, step, recipe.steps), recipe.batch_size).T
