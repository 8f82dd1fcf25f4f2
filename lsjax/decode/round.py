"""One draft-verify round of self-speculative decoding (LayerSkip, arXiv 2404.16710, section 4.3).

A round at length n reads the last committed token at position n - 1 and drafts up to K tokens with the first
``exit_layer`` layers; the deep layers then run once over the K + 1 hidden states that the early layers left. Drafts are
kept up to the first that the full model would not have written, and one more token of the full model's own follows.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from lsjax.checks import check_depth
from lsjax.decode.folding import fold_rows, write_rows
from lsjax.decode.sampling import accept_greedy, greedy
from lsjax.decode.state import DecodeState, Stats, check_model, check_usable
from lsjax.decode.stopping import at_eos, at_stop, first_end
from lsjax.decode.token_scores import score_tokens
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
        targets: int32 ``[batch, K + 1]``, its own choice after each of the positions n - 1 to n - 1 + K, if greedy.
        logits: float32 ``[batch, K + 1, vocab]``, its logits there; None where nothing but ``targets`` is wanted.
        processed: the same after the processors; None where there are none.
        cache: the deep layers' caches with these positions written.
    """

    targets: jax.Array
    logits: jax.Array | None
    processed: jax.Array | None
    cache: tuple[LayerCache, ...]


class _Drafting(NamedTuple):
    """What a draft step hands on to the next; ``text`` is the state's tokens with the drafts behind them."""

    step: jax.Array
    token: jax.Array
    tokens: jax.Array
    counts: jax.Array
    text: jax.Array | None
    probs: jax.Array | None
    hidden: jax.Array
    cache: tuple[LayerCache, ...]


@functools.partial(jax.jit, static_argnames="num_layers")
def draft(params: Model, state: DecodeState, *, num_layers: int | None = None) -> Draft:
    """Drafts with the first layers, one token at a time, each step writing the caches that verification shares.

    After the last draft its early layers run once more without the head, so that full acceptance leaves no hole. The
    loop takes as many steps as some row has use for: fewer near the limit, and where no row is confident enough.

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
    batch, width, options = state.tokens.shape[0], state.plan.num_speculations, state.options
    sampling, zero = options.sampling, jnp.int32(0)

    def early(now: _Drafting) -> tuple[jax.Array, jax.Array, tuple[LayerCache, ...]]:
        at = state.lengths - 1 + now.step
        step, cache = params.run_layers(
            params.embed(now.token[:, None]), now.cache, at, hi=depth, capacity=state.capacity
        )
        return step, lax.dynamic_update_slice(now.hidden, step, (zero, now.step, zero)), cache

    def one(now: _Drafting) -> _Drafting:
        step, hidden, cache = early(now)
        logits, position = params.draft_logits(step[:, 0]), state.lengths + now.step
        text, probs, counts = now.text, now.probs, now.counts
        if text is not None:
            logits = state.process(logits, text, position)
        if sampling is None:
            token, drawn_from = greedy(logits), None
        else:
            token, drawn_from = sampling.draw_draft(logits, position)
        if text is not None:
            text = write_rows(text, token[:, None], position)
        if drawn_from is not None and probs is not None:
            probs = lax.dynamic_update_slice(probs, drawn_from[:, None], (zero, now.step, zero))
        if options.confidence_threshold is not None:
            # By what is known before the draw, and after a draft that counts: a draft left out for what it is would
            # leave the others with another distribution than q.
            confidence = jnp.exp(logits.max(axis=-1) - jax.nn.logsumexp(logits, axis=-1))
            last = confidence < options.confidence_threshold
            counts = jnp.where(last, jnp.minimum(counts, now.step + 1), counts)
        tokens = lax.dynamic_update_slice(now.tokens, token[:, None], (zero, now.step))
        return _Drafting(now.step + 1, token, tokens, counts, text, probs, hidden, cache)

    now = _Drafting(
        step=zero,
        token=state.last_token,
        tokens=jnp.zeros((batch, width), jnp.int32),
        counts=state.draft_counts,
        text=None if options.processors is None or not options.process_drafts else state.tokens,
        probs=None,
        hidden=jnp.zeros((batch, width + 1, params.config.hidden_size), params.dtype),
        cache=state.cache[:depth],
    )
    if sampling is not None and not sampling.greedy_drafts:
        now = now._replace(probs=jnp.zeros((batch, width, params.config.vocab_size), jnp.float32))
    if width:
        with jax.named_scope("draft"):
            now = lax.while_loop(lambda now: now.step < jnp.max(now.counts), one, now)
    with jax.named_scope("last_draft"):
        _, hidden, cache = early(now)
    return Draft(now.tokens, now.counts, now.probs, hidden, cache, depth)


@jax.jit
def verify(params: Model, state: DecodeState, drafted: Draft) -> Verification:
    """Runs the layers after the exit over the kept hidden states, all positions at once, then the head."""
    exit_layer, num_layers, options = drafted.exit_layer, state.plan.num_layers, state.options
    with jax.named_scope("verify"):
        hidden, cache = params.run_layers(
            drafted.hidden,
            state.cache[exit_layer:],
            state.lengths - 1,
            lo=exit_layer,
            hi=num_layers,
            capacity=state.capacity,
        )
        logits, processed = params.logits(hidden), None
        if options.processors is not None:
            # Of the drafts each position sees those before it.
            text = write_rows(state.tokens, drafted.tokens, state.lengths)
            seen = state.lengths[:, None] + jnp.arange(logits.shape[1])
            processed = jax.vmap(state.process, in_axes=(1, None, 1), out_axes=1)(logits, text, seen)
        targets = greedy(logits if processed is None else processed)
        if options.sampling is None and not options.log_probs:
            logits = processed = None
        return Verification(targets, logits, processed, cache)


def commit(state: DecodeState, drafted: Draft, verification: Verification) -> DecodeState:
    """Accepts drafts and one token more, up to an EOS or a stop sequence; rewinds by what the length says.

    Greedy: the longest prefix of what the full model would have written; else by speculative sampling.
    """
    with jax.named_scope("commit"):
        options, targets = state.options, verification.targets
        logits = verification.logits if verification.processed is None else verification.processed
        if options.sampling is None or logits is None:
            accepted = accept_greedy(drafted.tokens, targets, drafted.counts)
        else:
            accepted, targets = options.sampling.accept(
                drafted.tokens, drafted.probs, logits, drafted.counts, state.lengths
            )
        slot = jnp.arange(targets.shape[1])
        ends = at_eos(targets, state.eos)
        if options.stops is not None:
            ends |= at_stop(state.tokens, targets, state.begins, state.lengths, options.stops)
        end = first_end(slot <= accepted[:, None], ends)
        count = jnp.where(state.done, 0, jnp.minimum(accepted, end) + 1)
        written = slot < count[:, None]
        scores = state.scores
        if scores is not None and verification.logits is not None and logits is not None:
            chosen_from = logits if options.sampling is None else options.sampling.filter(logits)
            same = verification.processed is None and options.sampling is None
            block = score_tokens(targets, verification.logits, None if same else chosen_from, options.top_n)
            scores = scores.put(block.where(written), state.lengths)
        lengths = state.lengths + count
        return state.replace(
            tokens=write_rows(state.tokens, jnp.where(written, targets, state.pad[:, None]), state.lengths),
            lengths=lengths,
            done=state.done | (end < targets.shape[1]) | (lengths >= state.limits),
            draft_lengths=_next_draft_lengths(state, drafted.counts, accepted),
            scores=scores,
            cache=drafted.cache + verification.cache,
            stats=_count(state, drafted.counts, accepted, end, count),
        )


def _next_draft_lengths(state: DecodeState, counts: jax.Array, accepted: jax.Array) -> jax.Array:
    """The schedule of transformers' assisted generation, a row at a time: 2 more where all were kept, else 1 less."""
    lengths, most = state.draft_lengths, state.plan.num_speculations
    if state.options.schedule == "constant" or not most:
        return lengths
    moved = jnp.clip(jnp.where(accepted == counts, lengths + 2, lengths - 1), 1, most)
    return jnp.where(counts > 0, moved, lengths)


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
