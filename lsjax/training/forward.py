"""The forward pass for training: the same layers over whole rows, without a cache, with layers dropped for samples."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from lsjax.config import LlamaConfig
from lsjax.model.llama import Block
from lsjax.model.projection import lookup
from lsjax.model.rope import rotation
from lsjax.params import Params
from lsjax.training.batch import Batch


def layer_outputs(
    params: Params, batch: Batch, kept: jax.Array | None = None, *, dtype: Any = None, remat: bool = False
) -> Iterator[jax.Array]:
    """What each layer returns, from the first to the last: ``[rows, length, hidden]``.

    Weights are read in ``dtype`` but for the embedding, whose rows are taken first, so that the gradients of a frequent
    token's row are summed in the weights' own dtype.

    Args:
        params: the model.
        batch: what it reads.
        kept: bool ``[layers, rows]``; a layer passes on its input, unchanged, for rows that are not kept. None: all
            are, as in evaluation.
        dtype: what is computed in; None: the weights' own.
        remat: whether reverse mode computes each layer anew from its input, which alone is then held.
    """
    config = params.config
    dtype = params.dtype if dtype is None else jnp.dtype(dtype)
    hidden = lookup(params.tree["embed_tokens"]["embedding"], batch.tokens).astype(dtype)
    angles = rotation(config, batch.positions, batch.tokens.shape[1])
    run = functools.partial(_run_layer, config, dtype)
    if remat:
        run = jax.checkpoint(run)
    for layer in range(config.num_hidden_layers):
        rows = None if kept is None else kept[layer]
        hidden = run(params.tree[f"layers_{layer}"], hidden, angles, batch.positions, batch.documents, rows)
        yield hidden


def _run_layer(
    config: LlamaConfig,
    dtype: Any,
    weights: dict[str, Any],
    hidden: jax.Array,
    angles: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    documents: jax.Array,
    kept: jax.Array | None,
) -> jax.Array:
    weights = jax.tree.map(lambda x: x.astype(dtype), weights)
    out, _ = Block(config).apply({"params": weights}, hidden, positions, angles, documents=documents)
    return out if kept is None else jnp.where(kept[:, None, None], out, hidden)
