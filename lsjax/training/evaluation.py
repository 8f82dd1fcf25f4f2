"""Looking at a model in training: each layer's loss and agreement on held-out text, and real drafts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lsjax.decode.generate import generate
from lsjax.decode.sampling import greedy
from lsjax.model.blocks import split_positions
from lsjax.params import Params
from lsjax.text.prompts import pad_rows
from lsjax.training.batch import IGNORED, Batch
from lsjax.training.forward import layer_outputs
from lsjax.training.losses import CHUNK, chunk_size, exit_logits, head_weights, label_losses


@dataclasses.dataclass(frozen=True, eq=False)
class HeldOut:
    """How the layers do on held-out text; index 0 is an exit after one layer, the last the whole model.

    Attributes:
        losses: float64 ``[layers]``, each exit's cross-entropy per label.
        agreement: float64 ``[layers]``, the share of labelled positions at which a layer names the last layer's token.
        labels: positions looked at.
    """

    losses: np.ndarray
    agreement: np.ndarray
    labels: int


def evaluate(params: Params, batches: Iterable[Batch], *, chunk: int | None = CHUNK, dtype: Any = None) -> HeldOut:
    """Runs every layer for every sample, teacher-forced.

    Args:
        params: the model.
        batches: of equal shape, so that one program serves all.
        chunk: positions of each row whose logits exist at once; None: all.
        dtype: what is computed in; None: the weights' own.
    """
    losses, agreeing = (np.zeros(params.config.num_hidden_layers) for _ in range(2))
    labels = 0
    for batch in batches:
        found = _evaluate(params, batch, chunk, None if dtype is None else jnp.dtype(dtype))
        losses += np.asarray(found[0], np.float64)
        agreeing += np.asarray(found[1])
        labels += int(found[2])
    return HeldOut(losses / max(labels, 1), agreeing / max(labels, 1), labels)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _evaluate(params: Params, batch: Batch, chunk: int | None, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums over the labels: float32 and int32 ``[layers]``, and how many labels there are."""
    config, head = params.config, head_weights(params)

    def look(given: tuple[list[jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
        states, labels = given
        losses, choices = [], []
        for state in states:
            logits = exit_logits(config, head, state, dtype)
            losses.append(label_losses(logits, labels).sum())
            choices.append(greedy(logits))
        agreeing = [jnp.sum((choice == choices[-1]) & (labels != IGNORED)) for choice in choices]
        return jnp.stack(losses), jnp.stack(agreeing)

    size = chunk_size(batch.labels, chunk)
    states = [split_positions(hidden, size) for hidden in layer_outputs(params, batch, dtype=dtype)]
    losses, agreeing = lax.map(look, (states, split_positions(batch.labels, size, constant_values=IGNORED)))
    return losses.sum(axis=0), agreeing.sum(axis=0), jnp.sum(batch.labels != IGNORED)


@dataclasses.dataclass(frozen=True)
class Drafts:
    """What self-speculative decoding did with an exit, over all prompts.

    Attributes:
        exit_layer: layers that drafted.
        num_speculations: drafts a round.
        acceptance_rate: accepted drafts / drafts.
        tokens_per_round: new tokens / rounds.
        new_tokens: tokens written.
    """

    exit_layer: int
    num_speculations: int
    acceptance_rate: float
    tokens_per_round: float
    new_tokens: int


def measure_drafts(
    params: Params,
    prompts: Sequence[np.ndarray],
    *,
    exits: Sequence[int],
    num_speculations: int = 4,
    max_new_tokens: int = 64,
) -> tuple[Drafts, ...]:
    """Lets the model continue prompts greedily by ``lsjax.generate``, once for each exit; no EOS ends a text.

    Args:
        params: the model.
        prompts: int ``[length]`` each.
        exits: layers that draft.
        num_speculations: drafts a round.
        max_new_tokens: new tokens of each prompt.
    """
    tokens, lengths = pad_rows(prompts)
    options: dict[str, Any] = {"num_speculations": num_speculations, "max_new_tokens": max_new_tokens}
    found = []
    for exit_layer in exits:
        out = generate(params, tokens, prompt_lengths=lengths, exit_layer=exit_layer, eos_token_id=(), **options)
        rounds, drafted, accepted, new = (
            int(np.asarray(value).sum())
            for value in (out.stats.rounds, out.stats.drafted, out.stats.accepted, out.stats.new_tokens)
        )
        rate, per_round = accepted / max(drafted, 1), new / max(rounds, 1)
        found.append(Drafts(exit_layer, num_speculations, rate, per_round, new))
    return tuple(found)
