"""The decode state: everything that a round reads and writes, one pytree."""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from lsjax.checks import check_params, is_traced
from lsjax.config import LlamaConfig
from lsjax.decode.options import Options
from lsjax.decode.token_scores import TokenScores
from lsjax.model.cache import LayerCache
from lsjax.params import Model


class Plan(NamedTuple):
    """What is static about a run: it decides which programs are compiled.

    Autoregressive decoding is the same state machine with zero drafts: nothing is drafted and every layer is early.

    Attributes:
        exit_layer: layers ``[0, exit_layer)`` draft and run once a position.
        num_layers: layers ``[exit_layer, num_layers)`` verify; the output is that of ``num_layers`` layers.
        num_speculations: drafts a round, K.
    """

    exit_layer: int
    num_layers: int
    num_speculations: int


class Stats(flax.struct.PyTreeNode):
    """What the rounds did, per row. Finished rows count nothing.

    Attributes:
        rounds: int32 ``[batch]``, rounds in which the row was active.
        drafted: int32 ``[batch]``, drafts that could have been kept: not those beyond an EOS or the limit.
        accepted: int32 ``[batch]``, drafts kept. The token that ends a round, correction or bonus, is no draft.
        new_tokens: int32 ``[batch]``, tokens committed, EOS included.
        accept_histogram: int32 ``[batch, K + 1]``, rounds by the number of drafts that they kept.
    """

    rounds: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    new_tokens: jax.Array
    accept_histogram: jax.Array

    @property
    def acceptance_rate(self) -> jax.Array:
        """float32 ``[batch]``: accepted / drafted, 0 where nothing was drafted."""
        return self.accepted / jnp.maximum(self.drafted, 1)

    @property
    def tokens_per_round(self) -> jax.Array:
        """float32 ``[batch]``: new tokens / rounds, 0 before the first."""
        return self.new_tokens / jnp.maximum(self.rounds, 1)


class DecodeState(flax.struct.PyTreeNode):
    """A resumable batch of half-written texts; every array starts with the batch axis.

    Invariant between rounds: row i has ``lengths[i] = n`` committed tokens, every layer's cache holds exactly
    ``n - 1`` valid positions, and the last committed token has not been through the model.

    Attributes:
        tokens: int32 ``[batch, slots]``, each row's committed tokens from the left, then padding.
        lengths: int32 ``[batch]``, committed tokens, prompt included.
        limits: int32 ``[batch]``, the length at which a row is done; at most ``capacity``.
        done: bool ``[batch]``, rows that reached an EOS or their limit. They change no more.
        eos: int32 ``[batch, count]``, ids that end each row, filled up with -1, which is no id.
        pad: int32 ``[batch]``, the id of padding.
        begins: int32 ``[batch]``, where each row's new tokens begin: after the prompt, or after what continued it last.
        draft_lengths: int32 ``[batch]``, the most drafts that each row makes in its next round.
        options: how tokens are chosen and rows end.
        scores: of the new tokens; None where they were not asked for.
        cache: keys and values of the first ``plan.num_layers`` layers.
        stats: what was done so far.
        plan: static.
        config: static; the model that this is a state of.
    """

    tokens: jax.Array
    lengths: jax.Array
    limits: jax.Array
    done: jax.Array
    eos: jax.Array
    pad: jax.Array
    begins: jax.Array
    draft_lengths: jax.Array
    options: Options
    scores: TokenScores | None
    cache: tuple[LayerCache, ...]
    stats: Stats
    plan: Plan = flax.struct.field(pytree_node=False)
    config: LlamaConfig = flax.struct.field(pytree_node=False)

    @property
    def capacity(self) -> int:
        """Tokens that a row can hold."""
        return self.tokens.shape[1] - slack(self.plan)

    @property
    def last_token(self) -> jax.Array:
        """int32 ``[batch]``: the committed token that the model has not read yet."""
        return jnp.take_along_axis(self.tokens, self.lengths[:, None] - 1, axis=1)[:, 0]

    @property
    def draft_counts(self) -> jax.Array:
        """int32 ``[batch]``: drafts that each row can use now; a round commits one token more than it accepts."""
        useful = jnp.clip(self.limits - self.lengths - 1, 0, self.draft_lengths)
        return jnp.where(self.done, 0, useful)

    def process(self, logits: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """Logits as the processors leave them.

        Args:
            logits: float32 ``[batch, vocab]``.
            tokens: int32 ``[batch, slots]``, the text that they follow.
            lengths: int32 ``[batch]``, how much of it there is.
        """
        processors = self.options.processors
        return logits if processors is None else processors.bind(self.begins, self.eos)(logits, tokens, lengths)

    @property
    def active(self) -> jax.Array:
        """bool ``[]``: whether any row goes on."""
        return ~jnp.all(self.done)


def check_model(params: Model, state: DecodeState) -> None:
    """That the state is one of this model."""
    check_params(params)
    if not isinstance(state, DecodeState):
        raise TypeError(f"state: expected a DecodeState, as lsjax.prefill makes it, got {type(state).__name__}")
    found = (state.config, state.cache[0].dtype if state.cache else params.dtype)
    if found != (params.config, params.dtype):
        raise ValueError(f"state: expected one of this model, {params.config} in {params.dtype}, got one of {found}")


def check_usable(params: Model, state: DecodeState) -> None:
    """:func:`check_model`, and that no round has taken the state's cache."""
    check_model(params, state)
    if not is_traced(state) and any(leaf.is_deleted() for leaf in jax.tree.leaves(state.cache)):
        raise ValueError(
            "state: its cache went into decode_round, which donates it: use the state that decode_round returned"
        )


def slack(plan: Plan) -> int:
    """Slots past the capacity, so that the last round of a full row, K + 1 positions wide, writes nothing old."""
    return plan.num_speculations + 1


def empty_stats(batch: int, plan: Plan) -> Stats:
    """Nothing done yet."""

    def zeros(*shape: int) -> jax.Array:
        return jnp.zeros((batch, *shape), jnp.int32)

    return Stats(zeros(), zeros(), zeros(), zeros(), zeros(plan.num_speculations + 1))
