"""``score``: log-probabilities of given texts, without holding a text's logits."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lsjax.checks import check_depth, check_int, check_params, is_traced
from lsjax.decode.folding import fold_rows
from lsjax.decode.prompts import place_like, read_prompts, to_bucket
from lsjax.decode.request import check_capacity, choose_capacity
from lsjax.decode.sampling import most_probable
from lsjax.model.blocks import join_positions, split_positions
from lsjax.params import Model

POSITION_CHUNK = 512
VOCAB_CHUNK = 8192


class ScoreOutput(flax.struct.PyTreeNode):
    """What :func:`score` returns; without the batch axis where the text had none.

    Column i is about the caller's column i of ``tokens``, given what stands before it in its row. Where nothing is
    predicted, at each row's first token and at padding, log-probabilities are 0 and ``top_tokens`` -1.

    Attributes:
        log_probs: float32 ``[batch, length]``, natural logarithms.
        lengths: int32 ``[batch]``, tokens of each row, its first included.
        top_tokens: int32 ``[batch, length, top_n]``, the most probable tokens, the lowest id first among equals; None
            where they were not asked for.
        top_log_probs: float32 ``[batch, length, top_n]``, theirs, falling.
    """

    log_probs: jax.Array
    lengths: jax.Array
    top_tokens: jax.Array | None = None
    top_log_probs: jax.Array | None = None

    @property
    def total_log_prob(self) -> jax.Array:
        """The logarithm of each row's probability given its first token: float32 ``[batch]``."""
        return self.log_probs.sum(axis=-1)

    @property
    def perplexity(self) -> jax.Array:
        """``exp`` of each row's mean negative log-probability over all tokens but its first: float32 ``[batch]``."""
        return jnp.exp(-self.total_log_prob / (self.lengths - 1))


def score(
    params: Model,
    tokens: Any,
    *,
    num_layers: int | None = None,
    top_n: int | None = None,
    prompt_lengths: Any = None,
    attention_mask: Any = None,
    capacity: int | None = None,
    position_chunk: int = POSITION_CHUNK,
    vocab_chunk: int = VOCAB_CHUNK,
) -> ScoreOutput:
    """Teacher-forced log-probabilities: of each token of a text, what the model gave it after those before it.

    The layers run once over the text. Of the logits only a block exists at a time, some positions by some of the
    vocabulary, from which the softmax's sum (online softmax, arXiv 1805.02867) and the most probable tokens are kept.
    Called eagerly, the length is padded to few sizes, so that other lengths rarely compile anew; inside a caller's
    ``jit`` shapes are the caller's, and ids and lengths are not checked: ids outside the vocabulary read its nearest
    end, and a row of one token has no perplexity (NaN). Differentiable in ``params``, in reverse mode.

    Args:
        params: the model.
        tokens: int ``[length]`` or ``[batch, length]``, the texts, at least 2 tokens a row.
        num_layers: static; how many layers to run before the final norm and head, None for all.
        top_n: static; how many of the most probable tokens of each position to return, 1..vocab_size. None: none.
        prompt_lengths: int ``[batch]``, tokens of each row of right-padded texts.
        attention_mask: ``[batch, length]`` of 0 and 1, texts padded on the left or right, instead.
        capacity: static; only for longrope: tokens that the texts may come to, which decides between its short and
            long factors. None: the length, padding included; give that of ``generate`` to score its own texts.
        position_chunk: static; positions of a block of logits, over all rows (but at least one of each).
        vocab_chunk: static; ids of a block.

    Raises:
        ValueError: says what was expected and what came.

    Example:
        >>> found = lsjax.score(params, tokens, top_n=5)
        >>> found.log_probs, found.perplexity, found.top_tokens
    """
    check_params(params)
    config = params.config
    depth = config.num_hidden_layers if num_layers is None else check_depth("num_layers", num_layers, config)
    count = 0 if top_n is None else check_int("top_n", top_n, 1, config.vocab_size)
    position_chunk = check_int("position_chunk", position_chunk, 1)
    vocab_chunk = min(check_int("vocab_chunk", vocab_chunk, 1), config.vocab_size)
    prompts = read_prompts(tokens, prompt_lengths, attention_mask, config, least=2)
    eager = not is_traced(params, prompts)
    if capacity is None:
        held = choose_capacity(config, prompts, 0, eager)
    else:
        held = check_capacity(capacity, prompts.width, prompts.longest)
    texts = _Texts(prompts.tokens, prompts.lengths, prompts.starts)
    if eager:
        texts = place_like(texts._replace(tokens=to_bucket(texts.tokens, held)), tokens)
    found = _score(params, texts, _Sizes(depth, count, held, position_chunk, vocab_chunk))
    return _trim(found, prompts.width, prompts.single)


class _Texts(NamedTuple):
    """int32 ``[batch, width]`` from the left, tokens of each row, and the caller's column where each began."""

    tokens: Any
    lengths: Any
    starts: Any


class _Sizes(NamedTuple):
    """What is static; ``top_n`` may be 0."""

    num_layers: int
    top_n: int
    capacity: int
    position_chunk: int
    vocab_chunk: int


class _Found(NamedTuple):
    """What becomes of logits: of the target ``[...]``, and of the most probable ids ``[..., top_n]``."""

    log_probs: jax.Array
    top_tokens: jax.Array
    top_log_probs: jax.Array


@functools.partial(jax.jit, static_argnums=2)
def _score(params: Model, texts: _Texts, sizes: _Sizes) -> ScoreOutput:
    run = functools.partial(_run, sizes=sizes)
    # Folding has no reverse mode of its own.
    scored = jax.custom_vjp(fold_rows(run))
    scored.defvjp(lambda *args: jax.vjp(run, *args), lambda pull_back, cotangents: pull_back(cotangents))
    return scored(params, texts)


def _run(params: Model, texts: _Texts, sizes: _Sizes) -> ScoreOutput:
    tokens, width = texts.tokens, texts.tokens.shape[1]
    hidden = params.embed(tokens[:, :-1])  # nothing is asked of the last token's own output
    hidden, _ = params.run_layers(hidden, (), 0, hi=sizes.num_layers, capacity=sizes.capacity)
    with jax.named_scope("score"):
        found = _over_positions(params, hidden, tokens[:, 1:], sizes)

    place = jnp.arange(width) - texts.starts[:, None]  # in its row, of each of the caller's columns
    predicted = (place >= 1) & (place < texts.lengths[:, None])
    source = jnp.clip(place - 1, 0, width - 2)

    def put(values: jax.Array, otherwise: int) -> jax.Array:
        extra = (1,) * (values.ndim - 2)
        values = jnp.take_along_axis(values, source.reshape(*source.shape, *extra), axis=1)
        return jnp.where(predicted.reshape(*predicted.shape, *extra), values, otherwise)

    top = (put(found.top_tokens, -1), put(found.top_log_probs, 0)) if sizes.top_n else ()
    return ScoreOutput(put(found.log_probs, 0), texts.lengths, *top)


def _over_positions(params: Model, hidden: jax.Array, targets: jax.Array, sizes: _Sizes) -> _Found:
    """``[batch, length, hidden]`` and ``[batch, length]``, some positions of every row at a time."""
    batch, length = targets.shape
    chunk = min(max(1, sizes.position_chunk // batch), length)

    def one(block: tuple[jax.Array, jax.Array]) -> _Found:
        found = _over_vocabulary(params, block[0].reshape(batch * chunk, -1), block[1].reshape(-1), sizes)
        return jax.tree.map(lambda x: x.reshape(batch, chunk, *x.shape[1:]), found)

    blocks = lax.map(one, (split_positions(hidden, chunk), split_positions(targets, chunk)))
    return jax.tree.map(lambda x: join_positions(x, length), blocks)


def _over_vocabulary(params: Model, hidden: jax.Array, targets: jax.Array, sizes: _Sizes) -> _Found:
    """``[positions, hidden]`` and ``[positions]``, some of the vocabulary at a time."""
    vocab, chunk, top_n = params.config.vocab_size, sizes.vocab_chunk, sizes.top_n
    targets = jnp.clip(targets, 0, vocab - 1)
    positions = targets.shape[0]

    def step(carry: Any, begin: jax.Array) -> tuple[Any, None]:
        maximum, total, target, top, top_ids = carry
        first = jnp.minimum(begin, vocab - chunk)  # the last chunk may overlap the one before it
        ids = first + jnp.arange(chunk, dtype=jnp.int32)
        logits = jnp.where(ids >= begin, params.logits(hidden, first, chunk), -jnp.inf)
        new_maximum = jnp.maximum(maximum, lax.stop_gradient(logits.max(axis=-1)))
        total = total * jnp.exp(maximum - new_maximum) + jnp.exp(logits - new_maximum[:, None]).sum(axis=-1)
        column = targets - first
        of_target = jnp.take_along_axis(logits, jnp.clip(column, 0, chunk - 1)[:, None], axis=1)[:, 0]
        target = jnp.where((targets >= begin) & (column < chunk), of_target, target)
        if top_n:
            # Earlier ids stand first, and the first of equals is taken.
            best, columns = most_probable(logits, min(top_n, chunk))
            best, best_ids = jnp.concatenate([top, best], axis=1), jnp.concatenate([top_ids, ids[columns]], axis=1)
            top, columns = lax.top_k(best, top_n)
            top_ids = jnp.take_along_axis(best_ids, columns, axis=1)
        return (new_maximum, total, target, top, top_ids), None

    least = jnp.full(positions, -jnp.inf, jnp.float32)
    zeros = jnp.zeros(positions, jnp.float32)
    top = jnp.full((positions, top_n), -jnp.inf, jnp.float32), jnp.zeros((positions, top_n), jnp.int32)
    begins = jnp.arange(0, vocab, chunk, dtype=jnp.int32)
    # Reverse mode makes each block of logits anew instead of keeping all of them.
    step = jax.checkpoint(step, prevent_cse=False)
    (maximum, total, target, top, top_ids), _ = lax.scan(step, (least, zeros, zeros, *top), begins)
    log_total = maximum + jnp.log(total)
    return _Found(target - log_total, top_ids, top - log_total[:, None])


def _trim(found: ScoreOutput, width: int, single: bool) -> ScoreOutput:
    """Cuts buckets to the caller's width: in NumPy where it can, since ``jnp`` would compile each slice."""
    placed = None if is_traced(found) else found.lengths.sharding
    if placed is not None:
        found = jax.tree.map(np.asarray, found)
    cut = {
        name: values[:, :width]
        for name in ("log_probs", "top_tokens", "top_log_probs")
        if (values := getattr(found, name)) is not None
    }
    found = found.replace(**cut)
    found = jax.tree.map(lambda x: x[0], found) if single else found
    return found if placed is None else jax.device_put(found, None if single else placed)
