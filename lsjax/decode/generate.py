"""The entry points: ``prefill`` makes a decode state, ``generate`` runs it to the end in one compiled loop."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lsjax.checks import check_depth, check_int, check_params, is_traced
from lsjax.config import LlamaConfig, token_ids
from lsjax.decode.prompts import Prompts, bucket, read_prompts, widen
from lsjax.decode.round import run_round
from lsjax.decode.state import DecodeState, Plan, Stats, check_usable, empty_stats, slack
from lsjax.decode.stopping import eos_array
from lsjax.params import Params

STRATEGIES = ("self_speculative", "early_exit", "autoregressive")
_MAX_NEW_TOKENS = 128
_NUM_SPECULATIONS = 4
_LEAST_PROMPT, _LEAST_CAPACITY = 16, 64  # the smallest buckets of eager calls


class GenerateOutput(flax.struct.PyTreeNode):
    """What :func:`generate` returns; without the batch axis where the prompt had none.

    Attributes:
        tokens: int32 ``[batch, prompt + max_new_tokens]``: each row its own prompt, its new tokens, then padding.
        lengths: int32 ``[batch]``: prompt and new tokens, EOS included.
        stats: what the rounds did; ``.acceptance_rate``, ``.tokens_per_round``.
    """

    tokens: jax.Array
    lengths: jax.Array
    stats: Stats


def generate(
    params: Params,
    tokens: Any,
    *,
    exit_layer: int | None = None,
    num_speculations: int = _NUM_SPECULATIONS,
    max_new_tokens: int = _MAX_NEW_TOKENS,
    strategy: str | None = None,
    prompt_lengths: Any = None,
    attention_mask: Any = None,
    eos_token_id: int | Iterable[int] | jax.Array | None = None,
    pad_token_id: int | jax.Array | None = None,
    capacity: int | None = None,
) -> GenerateOutput:
    """Continues prompts greedily, by default with self-speculative decoding (LayerSkip, arXiv 2404.16710).

    Self-speculative decoding writes token for token what autoregressive decoding would, up to ties of rounding (on
    accelerators float32 needs ``jax.default_matmul_precision("highest")`` for that). One compiled program does the
    prompt and all rounds. Called eagerly, prompt and capacity are padded to few sizes, so that other lengths rarely
    compile anew; inside a caller's ``jit`` shapes are the caller's, and ids and lengths are not checked: ids outside
    the vocabulary read its nearest end, lengths outside 1..width give rows without meaning.

    Args:
        params: the model.
        tokens: int ``[length]`` or ``[batch, length]``, the prompts.
        exit_layer: static; layers that draft, 1..num_hidden_layers. None: autoregressive decoding.
        num_speculations: static; drafts a round, at least 0.
        max_new_tokens: new tokens a row, at least 1.
        strategy: static; ``"self_speculative"`` (the default where ``exit_layer`` is given), ``"early_exit"`` (the
            first ``exit_layer`` layers alone write the text) or ``"autoregressive"`` (all layers, no drafts).
        prompt_lengths: int ``[batch]``, tokens of each row of right-padded prompts.
        attention_mask: ``[batch, length]`` of 0 and 1, prompts padded on the left or right, instead.
        eos_token_id: one id or several that end a row; None: the checkpoint's; ``()``: never stop.
        pad_token_id: fills up rows; None: the checkpoint's, or 0.
        capacity: static; tokens that the cache holds a row. None: chosen to fit. Under longrope it is also what
            texts may come to, and so decides between short and long factors (None: prompt, padding and new tokens).

    Raises:
        ValueError: says what was expected and what came.

    Example:
        >>> out = lsjax.generate(params, tokens, exit_layer=4, num_speculations=6, max_new_tokens=128)
        >>> out.tokens, out.stats.acceptance_rate
    """
    check_params(params)
    plan = make_plan(params.config, exit_layer, num_speculations, strategy)
    prompts = read_prompts(tokens, prompt_lengths, attention_mask, params.config)
    max_new_tokens = check_int("max_new_tokens", max_new_tokens, 1)
    eos, pad = _special_ids(params.config, eos_token_id, pad_token_id)
    width, longest = prompts.width, prompts.longest
    eager = not is_traced(params, prompts, eos, pad)
    if capacity is not None:
        held = _check_capacity(capacity, width, longest + max_new_tokens)
    else:
        held = _choose_capacity(params.config, prompts, max_new_tokens, eager)
    _warn_beyond_trained_length(params.config, longest + max_new_tokens)
    rows = widen(prompts.tokens, min(bucket(width, _LEAST_PROMPT), held)) if eager else prompts.tokens
    found = _generate(params, rows, prompts.lengths, np.int32(max_new_tokens), eos, pad, plan, held)
    return _trim(found, prompts, width + max_new_tokens, pad)


@functools.partial(jax.jit, static_argnums=(6, 7))
def _generate(
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    max_new_tokens: jax.Array,
    eos: jax.Array,
    pad: jax.Array,
    plan: Plan,
    capacity: int,
) -> GenerateOutput:
    state = _prefill(params, tokens, lengths, lengths + max_new_tokens, eos, pad, plan, capacity)
    state = lax.while_loop(lambda state: state.active, functools.partial(run_round, params), state)
    return GenerateOutput(state.tokens, state.lengths, state.stats)


def _trim(found: GenerateOutput, prompts: Prompts, width: int, pad: Any) -> GenerateOutput:
    """Cuts buckets to the caller's shapes: in NumPy where it can, since ``jnp`` would compile each slice."""
    traced = is_traced(found)
    xp: Any = jnp if traced else np
    found = found if traced else jax.tree.map(np.asarray, found)
    tokens = found.tokens[:, :width]
    tokens = xp.pad(tokens, ((0, 0), (0, width - tokens.shape[1])), constant_values=pad)
    found = found.replace(tokens=tokens)
    found = jax.tree.map(lambda x: x[0], found) if prompts.single else found
    return found if traced else jax.device_put(found)


def prefill(
    params: Params,
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

    Raises:
        ValueError: says what was expected and what came.
    """
    if state is not None:
        options = (capacity, exit_layer, num_speculations, strategy, eos_token_id, pad_token_id)
        if any(option is not None for option in options):
            raise ValueError(
                "a state that is continued keeps its options: give tokens, lengths and max_new_tokens only"
            )
        return _continue(params, tokens, state, max_new_tokens, prompt_lengths, attention_mask)
    check_params(params)
    num_speculations = _NUM_SPECULATIONS if num_speculations is None else num_speculations
    plan = make_plan(params.config, exit_layer, num_speculations, strategy)
    prompts = read_prompts(tokens, prompt_lengths, attention_mask, params.config)
    width, longest = prompts.width, prompts.longest
    eos, pad = _special_ids(params.config, eos_token_id, pad_token_id)
    new = check_int("max_new_tokens", max_new_tokens, 1) if max_new_tokens is not None else None
    if capacity is None:
        new = _MAX_NEW_TOKENS if new is None else new
        held = _choose_capacity(params.config, prompts, new, not is_traced(params, prompts))
    else:
        held = _check_capacity(capacity, width, longest + (1 if new is None else new))
    _warn_beyond_trained_length(params.config, longest if new is None else longest + new)
    limits = np.full(prompts.lengths.shape, held, np.int32) if new is None else prompts.lengths + np.int32(new)
    rows = widen(prompts.tokens, min(bucket(width, _LEAST_PROMPT), held))
    return _prefill_jit(params, rows, prompts.lengths, limits, eos, pad, plan, held)


def _prefill(
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    limits: jax.Array,
    eos: jax.Array,
    pad: jax.Array,
    plan: Plan,
    capacity: int,
) -> DecodeState:
    batch, width = tokens.shape
    slots = capacity + slack(plan)
    cache = params.init_cache(batch, slots, plan.num_layers)
    with jax.named_scope("prefill"):
        if width > 1:
            hidden = params.embed(tokens[:, :-1])
            _, cache = params.run_layers(hidden, cache, 0, hi=plan.num_layers, capacity=capacity)
    tokens = jnp.where(jnp.arange(width) < lengths[:, None], tokens, pad)
    return DecodeState(
        tokens=jnp.full((batch, slots), pad, jnp.int32).at[:, :width].set(tokens),
        lengths=lengths,
        limits=limits,
        done=lengths >= limits,
        eos=eos,
        pad=pad,
        cache=cache,
        stats=empty_stats(batch, plan),
        plan=plan,
        config=params.config,
    )


_prefill_jit = jax.jit(_prefill, static_argnums=(6, 7))


def _continue(
    params: Params,
    tokens: Any,
    state: DecodeState,
    max_new_tokens: int | None,
    prompt_lengths: Any,
    attention_mask: Any,
) -> DecodeState:
    check_usable(params, state)
    more = read_prompts(tokens, prompt_lengths, attention_mask, params.config, least=0)
    batch, width = more.tokens.shape
    if batch != state.tokens.shape[0]:
        raise ValueError(f"tokens: expected the state's {state.tokens.shape[0]} rows, got {batch}")
    new = None if max_new_tokens is None else check_int("max_new_tokens", max_new_tokens, 1)
    rows = more.tokens
    if not is_traced(state, more):
        growing = more.lengths > 0
        total = (np.asarray(state.lengths) + more.lengths)[growing]
        longest = int(total.max(initial=0)) + (new or 1) * bool(growing.any())
        if longest > state.capacity:
            raise ValueError(
                f"capacity: expected at least {longest} tokens (committed, more, and new ones), got {state.capacity}"
            )
        _warn_beyond_trained_length(params.config, longest, callers=2)
        rows = widen(rows, bucket(width, _LEAST_PROMPT))
    return _continue_jit(params, rows, more.lengths, None if new is None else np.int32(new), state)


@jax.jit
def _continue_jit(
    params: Params, tokens: jax.Array, lengths: jax.Array, max_new_tokens: jax.Array | None, state: DecodeState
) -> DecodeState:
    """Tokens past the capacity are left out (:func:`prefill` refuses them where it can see them)."""
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
        cache=cache,
    )


def make_plan(config: LlamaConfig, exit_layer: int | None, num_speculations: int, strategy: str | None) -> Plan:
    """The static part of a run from the caller's options."""
    if strategy is None:
        strategy = "autoregressive" if exit_layer is None else "self_speculative"
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    drafts = check_int("num_speculations", num_speculations, 0)
    layers = config.num_hidden_layers
    depth = None if exit_layer is None else check_depth("exit_layer", exit_layer, config)
    if strategy == "autoregressive":
        return Plan(layers, layers, 0)
    if depth is None:
        raise ValueError(f"exit_layer: expected a layer in 1..{layers} for strategy {strategy!r}, got None")
    return Plan(depth, depth, 0) if strategy == "early_exit" else Plan(depth, layers, drafts)


def _special_ids(config: LlamaConfig, eos_token_id: Any, pad_token_id: Any) -> tuple[Any, Any]:
    """EOS ids int32 ``[count]`` and the padding's id int32 ``[]``: values that may be traced, unlike their number."""
    if is_traced(eos_token_id):
        eos = jnp.atleast_1d(jnp.asarray(eos_token_id)).astype(jnp.int32)
    else:
        eos = eos_array(config.eos_token_id if eos_token_id is None else token_ids("eos_token_id", eos_token_id))
    if is_traced(pad_token_id):
        return eos, pad_token_id.astype(jnp.int32)
    (pad,) = token_ids("pad_token_id", [config.pad_token_id or 0 if pad_token_id is None else pad_token_id])
    return eos, np.int32(pad)


def _choose_capacity(config: LlamaConfig, prompts: Prompts, new: int, eager: bool) -> int:
    """Enough for ``new`` tokens a row, in few sizes where eager; a size by itself never makes a short text a long one.

    longrope turns texts that may come to more than its original length by other factors. A row must be what it is
    alone, so rows on both sides of that length are refused (traced lengths are not seen: there the width decides).
    """
    needed = prompts.width + new
    held = bucket(needed, _LEAST_CAPACITY) if eager else needed
    boundary = config.short_length
    if boundary is None or prompts.shortest + new > boundary:
        return held
    if needed > boundary:
        raise ValueError(
            f"tokens: rows that may come to {prompts.shortest + new} and to {needed} tokens (prompt, padding and new "
            f"ones) lie on both sides of longrope's original_max_position_embeddings={boundary}, where the rotation "
            f"changes: generate them apart, or give capacity= (above {boundary}: the long factors for every row)"
        )
    return min(held, boundary)


def _check_capacity(capacity: Any, width: int, needed: int) -> int:
    capacity = check_int("capacity", capacity, 1)
    if capacity < max(width, needed):
        raise ValueError(
            f"capacity: expected at least {max(width, needed)} tokens (prompt and new ones), got {capacity}"
        )
    return capacity


def _warn_beyond_trained_length(config: LlamaConfig, length: int, callers: int = 1) -> None:
    """A warning that points at the user's own line, ``callers`` functions of this module up."""
    if length > config.trained_length:
        dynamic = config.trained_length > config.max_position_embeddings
        warnings.warn(
            f"{length} tokens (prompt and new ones) exceed the length that the model was trained for, "
            f"max_position_embeddings={config.max_position_embeddings}"
            f"{' times the factor of its dynamic scaling' if dynamic else ''}: expect worse text past it",
            stacklevel=2 + callers,
        )
