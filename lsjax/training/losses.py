"""Cross-entropy of every exit over a large vocabulary, without ever holding a row's logits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lsjax.config import LlamaConfig
from lsjax.model.blocks import join_positions, split_positions
from lsjax.model.llama import Llama
from lsjax.params import Params
from lsjax.training.batch import IGNORED, Batch
from lsjax.training.curriculum import EarlyExitLoss
from lsjax.training.forward import layer_outputs

CHUNK = 256  # positions of each row whose logits exist at once


def head_weights(params: Params) -> dict[str, Any]:
    """The final norm and what makes logits, as a part of the tree: with tied weights, the embedding."""
    name = "embed_tokens" if params.config.tie_word_embeddings else "lm_head"
    return {"norm": params.tree["norm"], name: params.tree[name]}


def exit_logits(config: LlamaConfig, head: dict[str, Any], hidden: jax.Array, dtype: Any = None) -> jax.Array:
    """The final norm and the head over any layer's output, computed in ``dtype``: float32 ``[..., vocab]``."""
    if dtype is not None:
        head = jax.tree.map(lambda x: x.astype(dtype), head)
    logits: Any = Llama(config).apply({"params": head}, hidden, method="logits")
    return logits


def label_losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """``-log p(label)`` of each position, 0 where the label is -100: float32 ``[..., vocab]`` and ``[...]`` to it."""
    valid = labels != IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(valid, labels, 0))
    return jnp.where(valid, losses, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def weighted_losses(
    config: LlamaConfig,
    chunk: int | None,
    dtype: Any,
    head: dict[str, Any],
    hidden: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropies of several exits, and their sum by weights, of which alone there is a gradient.

    Exits are taken one after the other, and ``chunk`` positions of each row at a time, so that logits exist of so many
    only. Where a gradient is asked for it is made on the way, from the same logits: nothing is computed anew, and the
    gradient of the head is one array to which all add. An exit whose weight is 0 costs nothing.

    Args:
        config: static; the model's configuration, like the rest.
        chunk: static; None: all positions at once.
        dtype: static; what is computed in; None: the weights' own, in which the gradients of weights are summed anyway.
        head: of :func:`head_weights`.
        hidden: ``[exits, rows, length, hidden]``, the outputs of some layers.
        labels: int32 ``[rows, length]``, -100 where there is none.
        weights: float32 ``[exits]``; no gradient flows to them.

    Returns:
        float32 ``[]``, the sum of ``weights * losses``; and ``losses``, float32 ``[exits]``, each the sum of
        ``-log p(label)`` over all labels, 0 where the weight is.
    """
    size = chunk_size(labels, chunk)
    labels = split_positions(labels, size, constant_values=IGNORED)

    def on(hidden: jax.Array) -> jax.Array:
        def add(total: jax.Array, given: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + _loss(config, dtype, head, *given), None

        return lax.scan(add, jnp.zeros((), jnp.float32), (split_positions(hidden, size), labels))[0]

    def one(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        return lax.cond(given[1] > 0, on, lambda hidden: jnp.zeros((), jnp.float32), given[0])

    losses = lax.map(one, (hidden, weights))
    return jnp.vdot(weights, losses), losses


def _forward(
    config: LlamaConfig,
    chunk: int | None,
    dtype: Any,
    head: dict[str, Any],
    hidden: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, jax.Array]]:
    """The same, and the gradients of the sum in the head and in ``hidden``."""
    size = chunk_size(labels, chunk)
    labels = split_positions(labels, size, constant_values=IGNORED)

    def on(head_grad: Any, hidden: jax.Array, weight: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        def add(carry: tuple[Any, jax.Array], given: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
            (head_grad, total), (state, target) = carry, given
            loss, pull_back = jax.vjp(lambda head, state: _loss(config, dtype, head, state, target), head, state)
            of_head, of_state = pull_back(weight)
            return (jax.tree.map(jnp.add, head_grad, of_head), total + loss), of_state

        start = head_grad, jnp.zeros((), jnp.float32)
        (head_grad, loss), grad = lax.scan(add, start, (split_positions(hidden, size), labels))
        return head_grad, (join_positions(grad, hidden.shape[1]), loss)

    def off(head_grad: Any, hidden: jax.Array, weight: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        return head_grad, (jnp.zeros_like(hidden), jnp.zeros((), jnp.float32))

    def one(head_grad: Any, given: tuple[jax.Array, jax.Array]) -> tuple[Any, tuple[jax.Array, jax.Array]]:
        return lax.cond(given[1] > 0, on, off, head_grad, *given)

    head_grad, (grads, losses) = lax.scan(one, jax.tree.map(jnp.zeros_like, head), (hidden, weights))
    return (jnp.vdot(weights, losses), losses), (head_grad, grads)


def _backward(
    config: LlamaConfig, chunk: int | None, dtype: Any, grads: tuple[Any, jax.Array], cotangents: tuple[Any, Any]
) -> tuple[Any, jax.Array, None, None]:
    scale = cotangents[0]
    of_head, of_hidden = jax.tree.map(lambda grad: (grad * scale).astype(grad.dtype), grads)
    return of_head, of_hidden, None, None


weighted_losses.defvjp(_forward, _backward)


def _loss(config: LlamaConfig, dtype: Any, head: dict[str, Any], hidden: jax.Array, labels: jax.Array) -> jax.Array:
    with jax.named_scope("cross_entropy"):
        return label_losses(exit_logits(config, head, hidden, dtype), labels).sum()


def chunk_size(labels: jax.Array, chunk: int | None) -> int:
    """How many positions of ``[rows, length]`` are taken at a time; None: all."""
    return labels.shape[1] if chunk is None else min(chunk, labels.shape[1])


def exit_losses(
    params: Params,
    batch: Batch,
    weights: jax.Array,
    *,
    possible: Sequence[bool] | np.ndarray,
    kept: jax.Array | None = None,
    chunk: int | None = CHUNK,
    dtype: Any = None,
    remat: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The loss of a batch, not divided by its labels: float32 ``[]``; and that of each exit, float32 ``[layers]``.

    Args:
        params: the model.
        batch: what it reads, and the labels.
        weights: float32 ``[layers]``; an exit whose weight is 0 costs nothing, and its loss is 0.
        possible: static ``[layers]``; exits that may have a weight at all.
        kept: as of :func:`~lsjax.training.forward.layer_outputs`, like the rest.
        chunk: as of :func:`weighted_losses`.
        dtype: what is computed in.
        remat: whether layers are computed anew in reverse mode.
    """
    exits = np.flatnonzero(possible)
    outputs = layer_outputs(params, batch, kept, dtype=dtype, remat=remat)
    hidden = jnp.stack([output for layer, output in enumerate(outputs) if possible[layer]])
    head, at = head_weights(params), weights[exits]
    found: Any = weighted_losses(params.config, chunk, dtype, head, hidden, batch.labels, at)
    total, losses = found
    return total, jnp.zeros(len(weights), jnp.float32).at[exits].set(losses)


def last_layer_alone(num_layers: int) -> np.ndarray:
    """float32 ``[layers]``: the weights of plain training."""
    return (np.arange(num_layers) == num_layers - 1).astype(np.float32)


def possible_exits(early_exit: EarlyExitLoss | None, num_layers: int) -> np.ndarray:
    """bool ``[layers]``: exits that are on at some step with a weight above 0."""
    weights = last_layer_alone(num_layers) if early_exit is None else early_exit.exit_weights(num_layers)
    return weights > 0
