"""Log-probabilities of the tokens that decoding wrote, under the model that wrote them."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from lsjax.decode.folding import write_rows
from lsjax.decode.sampling import most_probable
from lsjax.decode.stopping import NO_TOKEN


class TokenScores(flax.struct.PyTreeNode):
    """What the model thought of each new token, given everything before it.

    Column i is about column i of the tokens. At the prompt and at padding log-probabilities are 0 and ``top_tokens``
    -1. Natural logarithms, of all layers' output (with ``strategy="early_exit"`` of the layers that write).

    Attributes:
        log_probs: float32 ``[batch, length]``, of the model itself.
        processed_log_probs: float32 ``[batch, length]``, of the distribution that the token was chosen from: after
            processors and, where tokens are drawn, temperature and filters (0 where they leave one token).
        top_tokens: int32 ``[batch, length, top_n]``, the model's own most probable tokens, the lowest id first among
            equals; None where they were not asked for.
        top_log_probs: float32 ``[batch, length, top_n]``, theirs, falling.
    """

    log_probs: jax.Array
    processed_log_probs: jax.Array
    top_tokens: jax.Array | None = None
    top_log_probs: jax.Array | None = None

    def where(self, written: jax.Array) -> TokenScores:
        """The same where bool ``[batch, length]`` is true, and elsewhere as at padding."""

        def keep(name: str, value: jax.Array | None) -> Any:
            if value is None:
                return None
            mask = written.reshape(*written.shape, *[1] * (value.ndim - 2))
            return jnp.where(mask, value, NO_TOKEN if name == "top_tokens" else 0)

        return TokenScores(**{name: keep(name, value) for name, value in vars(self).items()})

    def put(self, block: TokenScores, start: jax.Array) -> TokenScores:
        """The same with those of a block ``[batch, length]`` from each row's position, int32 ``[batch]``, on."""
        return jax.tree.map(lambda rows, values: write_rows(rows, values, start), self, block)


def empty_scores(batch: int, slots: int, top_n: int) -> TokenScores:
    """Those of padding."""
    zeros = jnp.zeros((batch, slots), jnp.float32)
    if not top_n:
        return TokenScores(zeros, zeros)
    shape = (batch, slots, top_n)
    return TokenScores(zeros, zeros, jnp.full(shape, NO_TOKEN, jnp.int32), jnp.zeros(shape, jnp.float32))


def score_tokens(tokens: jax.Array, logits: jax.Array, chosen_from: jax.Array | None, top_n: int) -> TokenScores:
    """Scores of int32 ``[batch, length]``.

    Args:
        tokens: the tokens.
        logits: float32 ``[batch, length, vocab]``, the model's own.
        chosen_from: the same after processors and filters; None: there are none.
        top_n: static; how many of the most probable tokens to keep.
    """

    def of_tokens(logits: jax.Array) -> jax.Array:
        found = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        return found - jax.nn.logsumexp(logits, axis=-1)

    own = of_tokens(logits)
    scores = TokenScores(own, own if chosen_from is None else of_tokens(chosen_from))
    if not top_n:
        return scores
    top, ids = most_probable(logits, top_n)
    top = top - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return scores.replace(top_tokens=ids, top_log_probs=top)
