"""One draft-verify round of self-speculative decoding (LayerSkip, arXiv 2404.16710, section 4.3).

A round at length n reads the last committed token at position n - 1 and drafts up to K tokens with the first
``exit_layer`` layers; the deep layers then run once over the K + 1 hidden states that the early layers left. Drafts are
kept up to the first that the full model would not have written, and one more token of the full model's own follows.
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from lsjax.checks import check_depth
from lsjax.decode.folding import fold_rows
from lsjax.decode.sampling import accept_greedy, greedy
from lsjax.decode.state import DecodeState, Stats, check_model, check_usable
from lsjax.decode.stopping import first_eos
from lsjax.model.cache import LayerCache
from lsjax.params import Model


class Draft(flax.struct.PyTreeNode):
    """What the early layers left for verification.

    Attributes:
        tokens: int32 ``[batch, K]``.
        counts: int32 ``[batch]``, how many of them each row may use.
        probs: float32 ``[batch, K, vocab]``, the distributions that they were drawn from; None: they are greedy.
        hidden: ``[batch, K + 1, hidden]``, the exit layer's output at positions n - 1 to n - 1 + K (zeros where the
            round drafted less).
        cache: the early layers' caches with these positions written.
        exit_layer: static; verification resumes here.
    """

    tokens: jax.Array
    counts: jax.Array
    probs: jax.Array | None
    hidden: jax.Array
    cache: tuple[LayerCache, ...]
    exit_layer: int = flax.struct.field(pytree_node=False)


class Verification(flax.struct.PyTreeNode):
    """What the full model says to a draft.

    Attributes:
        targets: int32 ``[batch, K + 1]``, its own most probable token after each of the positions n - 1 to n - 1 + K.
        logits: float32 ``[batch, K + 1, vocab]``, of which tokens are drawn; None where decoding is greedy.
        cache: the deep layers' caches with these positions written.
    """

    targets: jax.Array
    logits: jax.Array | None
    cache: tuple[LayerCache, ...]


@functools.partial(jax.jit, static_argnames="num_layers")
def draft(params: Model, state: DecodeState, *, num_layers: int | None = None) -> Draft:
    """Drafts with the first layers, one token at a time, each step writing the caches that verification shares.

    After the last draft its early layers run once more without the head, so that full acceptance leaves no hole. Near
    the limit the loop ends early: it takes as many steps as some row has use for.

    Args:
        params: the model.
        state: where each row is.
        num_layers: static; the exit layer of this draft, None for the state's own.
    """
    check_model(params, state)
    depth = state.plan.exit_layer
    if num_layers is not None:
        depth = check_depth("num_layers", num_layers, params.config)
        if depth > state.plan.num_layers:
            raise ValueError(f"num_layers: expected at most the state's {state.plan.num_layers} layers, got {depth}")
    batch, width = state.tokens.shape[0], state.plan.num_speculations
    counts = state.draft_counts
    start, zero, sampling = state.lengths - 1, jnp.int32(0), state.sampling

    def early(token, index, hidden, cache):
        hidden_in = params.embed(token[:, None])
        step, cache = params.run_layers(hidden_in, cache, start + index, hi=depth, capacity=state.capacity)
        return step, lax.dynamic_update_slice(hidden, step, (zero, index, zero)), cache

    def one(index, carry):
        token, tokens, probs, hidden, cache = carry
        step, hidden, cache = early(token, index, hidden, cache)
        logits = params.logits(step[:, 0])
        if sampling is None:
            token, drawn_from = greedy(logits), None
        else:
            token, drawn_from = sampling.draw_draft(logits, state.lengths + index)
        if drawn_from is not None:
            probs = lax.dynamic_update_slice(probs, drawn_from[:, None], (zero, index, zero))
        return token, lax.dynamic_update_slice(tokens, token[:, None], (zero, index)), probs, hidden, cache

    with jax.named_scope("draft"):
        token, cache = state.last_token, state.cache[:depth]
        tokens = jnp.zeros((batch, width), jnp.int32)
        hidden = jnp.zeros((batch, width + 1, params.config.hidden_size), params.dtype)
        probs = None
        if sampling is not None and not sampling.greedy_drafts:
            probs = jnp.zeros((batch, width, params.config.vocab_size), jnp.float32)
        steps = jnp.int32(0)
        if width:
            steps = jnp.max(counts)
            carry = token, tokens, probs, hidden, cache
            token, tokens, probs, hidden, cache = lax.fori_loop(zero, steps, one, carry)
    with jax.named_scope("last_draft"):
        _, hidden, cache = early(token, steps, hidden, cache)
    return Draft(tokens, counts, probs, hidden, cache, depth)


@jax.jit
def verify(params: Model, state: DecodeState, drafted: Draft) -> Verification:
    """Runs the layers after the exit over the kept hidden states, all positions at once, then the head."""
    exit_layer, num_layers = drafted.exit_layer, state.plan.num_layers
    with jax.named_scope("verify"):
        hidden, cache = params.run_layers(
            drafted.hidden,
            state.cache[exit_layer:],
            state.lengths - 1,
            lo=exit_layer,
            hi=num_layers,
            capacity=state.capacity,
        )
        logits = params.logits(hidden)
        return Verification(greedy(logits), None if state.sampling is None else logits, cache)


def commit(state: DecodeState, drafted: Draft, verification: Verification) -> DecodeState:
    """Accepts drafts and one token more, up to an EOS; rewinds by what the length says.

    Greedy: the longest prefix of what the full model would have written; else by speculative sampling.
    """
    with jax.named_scope("commit"):
        if state.sampling is None or verification.logits is None:
            targets = verification.targets
            accepted = accept_greedy(drafted.tokens, targets, drafted.counts)
        else:
            accepted, targets = state.sampling.accept(
                drafted.tokens, drafted.probs, verification.logits, drafted.counts, state.lengths
            )
        slot = jnp.arange(targets.shape[1])
        end = first_eos(targets, slot <= accepted[:, None], state.eos)
        count = jnp.where(state.done, 0, jnp.minimum(accepted, end) + 1)
        kept = jnp.where(slot < count[:, None], targets, state.pad[:, None])
        write = jax.vmap(lambda row, block, start: lax.dynamic_update_slice(row, block, (start,)))
        lengths = state.lengths + count
        return state.replace(
            tokens=write(state.tokens, kept, state.lengths),
            lengths=lengths,
            done=state.done | (end < targets.shape[1]) | (lengths >= state.limits),
            cache=drafted.cache + verification.cache,
            stats=_count(state, drafted.counts, accepted, end, count),
        )


def _count(state: DecodeState, counts: jax.Array, accepted: jax.Array, end: jax.Array, count: jax.Array) -> Stats:
    """The statistics after a round; see :class:`~lsjax.decode.state.Stats` for what counts."""
    stats, active = state.stats, (~state.done).astype(jnp.int32)
    kept = jnp.minimum(accepted, count)
    bins = jnp.arange(stats.accept_histogram.shape[1])
    return Stats(
        rounds=stats.rounds + active,
        drafted=stats.drafted + active * jnp.minimum(counts, end + 1),
        accepted=stats.accepted + kept,
        new_tokens=stats.new_tokens + count,
        accept_histogram=stats.accept_histogram + active[:, None] * (kept[:, None] == bins).astype(jnp.int32),
    )


def run_round(params: Model, state: DecodeState) -> DecodeState:
    """Draft, verify, commit: what ``generate`` loops over and :func:`decode_round` compiles alone."""
    drafted = draft(params, state)
    return commit(state, drafted, verify(params, state, drafted))


def decode_round(params: Model, state: DecodeState) -> DecodeState:
    """One draft-verify round from the host, for streaming, chat and experiments.

    Compiled once for each combination of shapes and plan. The state's cache is donated, so that no copy of it is made:
    use the returned state from here on. Once no row is active, a round changes nothing but the cache's garbage.

    Args:
        params: the model.
        state: of :func:`~lsjax.decode.prefill.prefill` or of an earlier round.

    Returns:
        the state with 1 to K + 1 more tokens in every active row.

    Raises:
        ValueError: the state is another model's, or went into a round already.
    """
    check_usable(params, state)
    return _decode_round(params, state.replace(cache=()), state.cache)


@functools.partial(jax.jit, donate_argnums=2)
def _decode_round(params: Model, state: DecodeState, cache: tuple[LayerCache, ...]) -> DecodeState:
    # Only the cache is donated: the small arrays may be shared with the states of other continuations.
    return fold_rows(run_round)(params, state.replace(cache=cache))
