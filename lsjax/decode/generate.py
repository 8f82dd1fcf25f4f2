"""``generate``: prompts to finished rows, in one compiled loop of rounds."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lsjax.checks import check_int, check_params, is_traced
from lsjax.decode.folding import fold_rows
from lsjax.decode.options import make_options
from lsjax.decode.prefill import start
from lsjax.decode.processors import Processor
from lsjax.decode.prompts import read_prompts
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
from lsjax.decode.round import run_round
from lsjax.decode.state import Plan, Stats, slack
from lsjax.decode.stopping import NO_TOKEN
from lsjax.decode.token_scores import TokenScores
from lsjax.params import Model


class GenerateOutput(flax.struct.PyTreeNode):
    """What :func:`generate` returns; without the batch axis where the prompt had none.

    Attributes:
        tokens: int32 ``[batch, prompt + max_new_tokens]``: each row its own prompt, its new tokens, then padding.
        lengths: int32 ``[batch]``: prompt and new tokens, EOS included.
        stats: what the rounds did; ``.acceptance_rate``, ``.tokens_per_round``.
        scores: log-probabilities of the new tokens; None where they were not asked for.
    """

    tokens: jax.Array
    lengths: jax.Array
    stats: Stats
    scores: TokenScores | None = None


def generate(
    params: Model,
    tokens: Any,
    *,
    exit_layer: int | None = None,
    num_speculations: int = NUM_SPECULATIONS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    strategy: str | None = None,
    prompt_lengths: Any = None,
    attention_mask: Any = None,
    eos_token_id: int | Iterable[int] | jax.Array | None = None,
    pad_token_id: int | jax.Array | None = None,
    capacity: int | None = None,
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
) -> GenerateOutput:
    """Continues prompts, with an exit layer by self-speculative decoding (LayerSkip, arXiv 2404.16710).

    Greedy self-speculative decoding writes token for token what autoregressive decoding would, up to ties of rounding
    (on accelerators float32 needs ``jax.default_matmul_precision("highest")`` for that); with a ``key`` its tokens are
    distributed as autoregressive decoding's are (speculative sampling, arXiv 2211.17192). One compiled program does the
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
        key: a PRNG key to draw tokens with (row i of a batch uses ``jax.random.fold_in(key, i)``), or one for each row.
            Every draw is keyed by its position in the row, so it depends neither on other rows nor on the capacity.
        temperature: a number of at least 0, or one for each row, like the rest; 0 is greedy. None: 1 with a key.
        top_k: keeps the most probable tokens, so many, and what equals the last of them.
        top_p: of these keeps the most probable ones that together hold at least this much, in (0, 1].
        min_p: of these keeps those at least so many times as probable as the most probable one, in [0, 1].
        greedy_drafts: static; drafts are the early layers' most probable tokens instead of drawn ones. Either way the
            text is distributed the same; it changes how many drafts are kept.
        processors: one or several functions ``(logits, tokens, lengths) -> logits`` that change float32
            ``[batch, vocab]`` by the text so far before a token is chosen (before temperature and filters), first to
            last; :mod:`lsjax.processors` has ready ones and says what they may do. Each position sees prompt, accepted
            tokens and the drafts before it, each token once.
        process_drafts: static; whether drafts are chosen from processed logits too. Either way the text is the same.
        stop_sequences: sequences of ids, such as ``[[13, 198], [2]]``, at the end of the earliest of which a row ends;
            it is kept, as an EOS is. One that began in the prompt does not count. Or an int array ``[count, width]`` or
            ``[batch, count, width]``, filled up with -1.
        log_probs: static; whether to return ``scores``, the new tokens' log-probabilities.
        top_n: static; of each position so many of the most probable tokens with them.
        confidence_threshold: in 0..1; a row drafts no more this round after a draft from early layers whose most
            probable token (before temperature) was less probable than this. It changes speed and never the text.
        num_speculations_schedule: static; ``"constant"``, or ``"heuristic"``: a row drafts 2 tokens more (up to
            ``num_speculations``, with which it begins) after a round of which all were kept, else 1 less, at least 1.

    Raises:
        ValueError: says what was expected and what came.

    Example:
        >>> out = lsjax.generate(params, tokens, exit_layer=4, num_speculations=6, max_new_tokens=128)
        >>> out.tokens, out.stats.acceptance_rate
    """
    call = _read_call(
        params,
        tokens,
        exit_layer=exit_layer,
        num_speculations=num_speculations,
        max_new_tokens=max_new_tokens,
        strategy=strategy,
        prompt_lengths=prompt_lengths,
        attention_mask=attention_mask,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        capacity=capacity,
        key=key,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        greedy_drafts=greedy_drafts,
        processors=processors,
        process_drafts=process_drafts,
        stop_sequences=stop_sequences,
        log_probs=log_probs,
        top_n=top_n,
        confidence_threshold=confidence_threshold,
        num_speculations_schedule=num_speculations_schedule,
    )
    found = _generate(params, call.request, call.plan, call.capacity)
    return _trim(found, call.request.pad, call.width, call.single)


def lower(params: Model, tokens: Any, **options: Any) -> jax.stages.Lowered:
    """The program that :func:`generate` runs for these arguments: its text, its cost, its memory.

    Once ``generate`` has run with them, ``.compile()`` finds the same program and costs nothing.

    Args:
        params: as of :func:`generate`, like the rest.
        tokens: the prompts.
        options: any of its options.

    Example:
        >>> lower(params, tokens, exit_layer=4).compile().memory_analysis()
    """
    call = _read_call(params, tokens, **options)
    return _generate.lower(params, call.request, call.plan, call.capacity)


class _Call(NamedTuple):
    """A call of :func:`generate`, checked: what its program takes, and the shape of what it returns."""

    request: Request
    plan: Plan
    capacity: int
    width: int
    single: bool


def _read_call(
    params: Model,
    tokens: Any,
    *,
    exit_layer: int | None = None,
    num_speculations: int = NUM_SPECULATIONS,
    max_new_tokens: int = MAX_NEW_TOKENS,
    strategy: str | None = None,
    prompt_lengths: Any = None,
    attention_mask: Any = None,
    eos_token_id: int | Iterable[int] | jax.Array | None = None,
    pad_token_id: int | jax.Array | None = None,
    capacity: int | None = None,
    **others: Any,
) -> _Call:
    check_params(params)
    plan = make_plan(params.config, exit_layer, num_speculations, strategy)
    prompts = read_prompts(tokens, prompt_lengths, attention_mask, params.config)
    max_new_tokens = check_int("max_new_tokens", max_new_tokens, 1)
    width, longest = prompts.width, prompts.longest
    limits = prompts.lengths + np.int32(max_new_tokens)
    eager = not is_traced(params, prompts, eos_token_id, pad_token_id, others)
    if capacity is not None:
        held = check_capacity(capacity, width, longest + max_new_tokens)
    else:
        held = choose_capacity(params.config, prompts, max_new_tokens, eager)
    warn_beyond_trained_length(params.config, longest + max_new_tokens)
    options = make_options(params.config, prompts.tokens.shape[0], held + slack(plan), **others)
    request = make_request(params.config, prompts, limits, eos_token_id, pad_token_id, options)
    if eager:
        request = request.to_bucket(held).place_like(tokens)
    return _Call(request, plan, held, width + max_new_tokens, prompts.single)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _generate(params: Model, request: Request, plan: Plan, capacity: int) -> GenerateOutput:
    def run(params: Model, request: Request) -> GenerateOutput:
        state = start(params, request, plan, capacity)
        state = lax.while_loop(lambda state: state.active, functools.partial(run_round, params), state)
        return GenerateOutput(state.tokens, state.lengths, state.stats, state.scores)

    # Token ids have no gradient; without this a caller's grad would meet the loop, which has no reverse mode.
    return fold_rows(run)(lax.stop_gradient(params), request)


def _trim(found: GenerateOutput, pad: Any, width: int, single: bool) -> GenerateOutput:
    """Cuts buckets to the caller's shapes: in NumPy where it can, since ``jnp`` would compile each slice."""
    traced = is_traced(found)
    placed = None if traced else found.lengths.sharding
    xp: Any = jnp if traced else np
    found, pad = (found, pad) if traced else jax.tree.map(np.asarray, (found, pad))

    def cut(values: Any, padding: Any) -> Any:
        values = values[:, :width]
        if missing := width - values.shape[1]:
            shape = (values.shape[0], missing, *values.shape[2:])
            values = xp.concatenate([values, xp.broadcast_to(padding, shape).astype(values.dtype)], axis=1)
        return values

    scores = found.scores
    if scores is not None:
        fill = {"top_tokens": NO_TOKEN}
        scores = scores.replace(**{k: cut(v, fill.get(k, 0)) for k, v in vars(scores).items() if v is not None})
    found = found.replace(tokens=cut(found.tokens, pad[:, None]), scores=scores)
    found = jax.tree.map(lambda x: x[0], found) if single else found
    return found if traced else jax.device_put(found, None if single else placed)
