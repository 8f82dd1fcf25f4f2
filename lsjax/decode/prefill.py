"""``prefill``: reads prompts into a decode state, or continues one at an offset."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsjax.checks import check_int, check_params, is_traced
from lsjax.decode.folding import fold_rows
from lsjax.decode.options import changed, make_options
from lsjax.decode.processors import Processor
from lsjax.decode.prompts import read_prompts, to_bucket
from lsjax.decode.request import (
    MAX_NEW_TOKENS,
    NUM_SPECULATIONS,
    Request,
    check_capacity,
    choose_capacity,
    make_plan,
    make_request,
    warn_beyond_trained_length,
)
from lsjax.decode.state import DecodeState, Plan, check_usable, empty_stats, slack
from lsjax.decode.token_scores import empty_scores
from lsjax.params import Model


def prefill(
    params: Model,
    tokens: Any,
    *,
    state: DecodeState | None = None,
    capacity: int | None = None,
    exit_layer: int | None = None,
    num_speculations: int | None = None,
    max_new_tokens: int | None = None,
    strategy: str | None = None,
    prompt_lengths: Any = None,
    attention_mask: Any = None,
    eos_token_id: int | Iterable[int] | jax.Array | None = None,
    pad_token_id: int | jax.Array | None = None,
    key: jax.Array | None = None,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    greedy_drafts: bool = False,
    processors: Processor | Iterable[Processor] | None = None,
    process_drafts: bool = True,
    stop_sequences: Any = None,
    log_probs: bool = False,
    top_n: int | None = None,
    confidence_threshold: Any = None,
    num_speculations_schedule: str = "constant",
) -> DecodeState:
    """Reads prompts into a decode state for :func:`~lsjax.decode.round.decode_round`, or continues one at an offset.

    Every layer runs once over all tokens but the last. The last token waits for the first round, which reads it as it
    reads every committed token; so a state that is continued is what one long prompt would have made it.

    Args:
        params: the model.
        tokens: int ``[length]`` or ``[batch, length]``; the state's batch where one is given. Continuing, a row may
            have 0 tokens (``prompt_lengths``) and then stays as it is.
        state: continue this one: ``tokens`` follow what each row has committed, generated tokens included, and rows
            that were done go on. The old state stays usable, so that a prefix can be shared by many continuations.
            Plan, capacity and special ids stay those of the state.
        capacity: static; tokens that a row can hold in all. None: enough for the prompt and ``max_new_tokens``.
            Under longrope it decides between short and long factors, as of ``generate``.
        exit_layer: static; as in :func:`~lsjax.decode.generate.generate`, like the rest.
        num_speculations: static; None: 4.
        max_new_tokens: rows are done after so many new tokens; None: at the capacity (without one: 128 tokens).
        strategy: static.
        prompt_lengths: int ``[batch]``.
        attention_mask: ``[batch, length]``.
        eos_token_id: one id or several.
        pad_token_id: fills up rows.
        key: to draw tokens with, as of :func:`~lsjax.decode.generate.generate`, like the rest; None: greedy decoding.
        temperature: of the draws.
        top_k: likewise.
        top_p: likewise.
        min_p: likewise.
        greedy_drafts: static.
        processors: of the logits.
        process_drafts: static.
        stop_sequences: sequences of ids that end a row.
        log_probs: static; whether the state keeps ``scores``.
        top_n: static.
        confidence_threshold: below which drafting ends.
        num_speculations_schedule: static.

    Raises:
        ValueError: says what was expected and what came.
    """
    given = {
        "key": key,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "greedy_drafts": greedy_drafts,
        "processors": processors,
        "process_drafts": process_drafts,
        "stop_sequences": stop_sequences,
        "log_probs": log_probs,
        "top_n": top_n,
        "confidence_threshold": confidence_threshold,
        "num_speculations_schedule": num_speculations_schedule,
    }
    if state is not None:
        fixed = (capacity, exit_layer, num_speculations, strategy, eos_token_id, pad_token_id)
        if any(option is not None for option in (*fixed, *changed(given))):
            raise ValueError(
                "a state that is continued keeps its options: give tokens, lengths and max_new_tokens only"
            )
        return _continue(params, tokens, state, max_new_tokens, prompt_lengths, attention_mask)
    check_params(params)
    num_speculations = NUM_SPECULATIONS if num_speculations is None else num_speculations
    plan = make_plan(params.config, exit_layer, num_speculations, strategy)
    prompts = read_prompts(tokens, prompt_lengths, attention_mask, params.config)
    width, longest = prompts.width, prompts.longest
    new = check_int("max_new_tokens", max_new_tokens, 1) if max_new_tokens is not None else None
    eager = not is_traced(params, prompts)
    if capacity is None:
        new = MAX_NEW_TOKENS if new is None else new
        held = choose_capacity(params.config, prompts, new, eager)
    else:
        held = check_capacity(capacity, width, longest + (1 if new is None else new))
    warn_beyond_trained_length(params.config, longest if new is None else longest + new)
    limits = np.full(prompts.lengths.shape, held, np.int32) if new is None else prompts.lengths + np.int32(new)
    options = make_options(params.config, prompts.tokens.shape[0], held + slack(plan), **given)
    request = make_request(params.config, prompts, limits, eos_token_id, pad_token_id, options)
    if eager:
        request = request.to_bucket(held).place_like(tokens)
    return start(params, request, plan, held)


@functools.partial(jax.jit, static_argnames=("plan", "capacity"))
def start(params: Model, request: Request, plan: Plan, capacity: int) -> DecodeState:
    """The state before the first round: every layer has read all prompt tokens but the last."""
    (batch, width), options = request.tokens.shape, request.options
    slots = capacity + slack(plan)
    cache = params.init_cache(batch, slots, plan.num_layers)
    with jax.named_scope("prefill"):
        if width > 1:
            hidden = params.embed(request.tokens[:, :-1])
            _, cache = params.run_layers(hidden, cache, 0, hi=plan.num_layers, capacity=capacity)
    given = jnp.arange(width) < request.lengths[:, None]
    pad = request.pad[:, None]
    padding = jnp.broadcast_to(pad, (batch, slots - width))
    return DecodeState(
        tokens=jnp.concatenate([jnp.where(given, request.tokens, pad), padding], axis=1),
        lengths=request.lengths,
        limits=request.limits,
        done=request.lengths >= request.limits,
        eos=request.eos,
        pad=request.pad,
        begins=request.lengths,
        draft_lengths=jnp.full_like(request.lengths, plan.num_speculations),
        options=options,
        scores=empty_scores(batch, slots, options.top_n) if options.log_probs else None,
        cache=cache,
        stats=empty_stats(batch, plan),
        plan=plan,
        config=params.config,
    )


def _continue(
    params: Model,
    tokens: Any,
    state: DecodeState,
    max_new_tokens: int | None,
    prompt_lengths: Any,
    attention_mask: Any,
) -> DecodeState:
    check_usable(params, state)
    more = read_prompts(tokens, prompt_lengths, attention_mask, params.config, least=0)
    batch = more.tokens.shape[0]
    if batch != state.tokens.shape[0]:
        raise ValueError(f"tokens: expected the state's {state.tokens.shape[0]} rows, got {batch}")
    new = None if max_new_tokens is None else check_int("max_new_tokens", max_new_tokens, 1)
    if not is_traced(state, more):
        growing = more.lengths > 0
        total = (np.asarray(state.lengths) + more.lengths)[growing]
        longest = int(total.max(initial=0)) + (new or 1) * bool(growing.any())
        if longest > state.capacity:
            raise ValueError(
                f"capacity: expected at least {longest} tokens (committed, more, and new ones), got {state.capacity}"
            )
        warn_beyond_trained_length(params.config, longest)
        more = more._replace(tokens=to_bucket(more.tokens))
    allowed = None if new is None else np.full(batch, new, np.int32)
    return _read_on(params, (more.tokens, more.lengths, allowed, state))


@jax.jit
def _read_on(params: Model, rows: tuple[jax.Array, jax.Array, jax.Array | None, DecodeState]) -> DecodeState:
    return fold_rows(_append)(params, rows)


def _append(params: Model, rows: tuple[jax.Array, jax.Array, jax.Array | None, DecodeState]) -> DecodeState:
    """Tokens past the capacity are left out (:func:`prefill` refuses them where it can see them)."""
    tokens, lengths, max_new_tokens, state = rows
    slots = state.tokens.shape[1]
    column = jnp.arange(tokens.shape[1])
    given = column < lengths[:, None]
    # The model has not read the last committed token, so it comes first and the last of the new ones waits.
    unread = jnp.concatenate([state.last_token[:, None], tokens[:, :-1]], axis=1)
    start = state.lengths - 1
    write_at = jnp.where(given, start[:, None] + column, slots)
    with jax.named_scope("prefill"):
        _, cache = params.run_layers(
            params.embed(unread),
            state.cache,
            start,
            hi=state.plan.num_layers,
            write_at=write_at,
            capacity=state.capacity,
        )
    total = jnp.minimum(state.lengths + lengths, state.capacity)
    limits = jnp.full_like(total, state.capacity)
    if max_new_tokens is not None:
        limits = jnp.minimum(total + max_new_tokens, state.capacity)
    limits = jnp.where(lengths == 0, state.limits, limits)
    put_at = jnp.where(given & (write_at + 1 < state.capacity), write_at + 1, slots)
    put = jax.vmap(lambda row, values, at: row.at[at].set(values, mode="drop"))
    return state.replace(
        tokens=put(state.tokens, tokens, put_at),
        lengths=total,
        limits=limits,
        done=jnp.where(lengths == 0, state.done, total >= limits),
        begins=jnp.where(lengths == 0, state.begins, total),
        scores=None if state.scores is None else state.scores.where(jnp.arange(slots) < state.lengths[:, None]),
        cache=cache,
    )
