"""Cross-entropy of every exit over a large vocabulary, without ever holding a row's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lsjax.config import LlamaConfig
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


def cross_entropy(
    config: LlamaConfig,
    head: dict[str, Any],
    hidden: jax.Array,
    labels: jax.Array,
    *,
    chunk: int | None = CHUNK,
    dtype: Any = None,
) -> jax.Array:
    """The sum of ``-log p(label)`` over all positions that have a label: float32 ``[]``, 0 where none has.

    Norm, head and softmax run over ``chunk`` positions of each row at a time, and in reverse mode once more, so that
    only so many logits exist at once. Weights are converted to ``dtype`` chunk by chunk, so that their gradients are
    summed in their own.

    Args:
        config: the model's configuration.
        head: of :func:`head_weights`.
        hidden: ``[rows, length, hidden]``, any layer's output.
        labels: int32 ``[rows, length]``, -100 where there is none.
        chunk: static; None: the whole length at once, and nothing computed anew.
        dtype: what is computed in; None: the weights' own.
    """

    def of(hidden: jax.Array, labels: jax.Array) -> jax.Array:
        return label_losses(exit_logits(config, head, hidden, dtype), labels).sum()

    with jax.named_scope("cross_entropy"):
        if chunk is None:
            return of(hidden, labels)
        chunks = split_length(hidden, chunk, 0), split_length(labels, chunk, IGNORED)
        step = jax.checkpoint(lambda total, given: (total + of(*given), None), prevent_cse=False)
        return lax.scan(step, jnp.zeros((), jnp.float32), chunks)[0]


def split_length(x: jax.Array, chunk: int, fill: int) -> jax.Array:
    """``[rows, length, ...]`` to ``[chunks, rows, chunk, ...]``; rows stay an axis, split between devices or not."""
    chunk = min(chunk, x.shape[1])
    widths = [(0, 0), (0, -x.shape[1] % chunk)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, widths, constant_values=fill)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


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
) -> jax.Array:
    """Each exit's cross-entropy, summed over the labels: float32 ``[layers]``, 0 for exits whose weight is 0.

    Args:
        params: the model.
        batch: what it reads, and the labels.
        weights: float32 ``[layers]``; an exit whose weight is 0 costs nothing.
        possible: static ``[layers]``; exits that may have a weight at all.
        kept: as of :func:`~lsjax.training.forward.layer_outputs`, like the rest.
        chunk: as of :func:`cross_entropy`.
        dtype: what is computed in.
        remat: whether layers are computed anew in reverse mode.
    """
    last = params.config.num_hidden_layers - 1

    # The head alone goes through the conditionals: reverse mode makes zeros of what does, for exits that are off.
    def loss(head: dict[str, Any], hidden: jax.Array) -> jax.Array:
        return cross_entropy(params.config, head, hidden, batch.labels, chunk=chunk, dtype=dtype)

    head = head_weights(params)
    found = []
    for layer, hidden in enumerate(layer_outputs(params, batch, kept, dtype=dtype, remat=remat)):
        if layer == last:
            found.append(loss(head, hidden))
        elif possible[layer]:
            found.append(lax.cond(weights[layer] > 0, loss, lambda *_: jnp.zeros((), jnp.float32), head, hidden))
        else:
            found.append(jnp.zeros((), jnp.float32))
    return jnp.stack(found)


def last_layer_alone(num_layers: int) -> np.ndarray:
    """float32 ``[layers]``: the weights of plain training."""
    return (np.arange(num_layers) == num_layers - 1).astype(np.float32)


def possible_exits(early_exit: EarlyExitLoss | None, num_layers: int) -> np.ndarray:
    """bool ``[layers]``: exits that are on at some step with a weight above 0."""
    weights = last_layer_alone(num_layers) if early_exit is None else early_exit.exit_weights(num_layers)
    return weights > 0
