"""Where two greedy texts first part, and whether rounding alone explains it: the rule of what counts as lossless."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lsjax.decode.prompts import to_bucket
from lsjax.params import Model

# What rounding decides, in standard deviations of the logits. In 16 bits texts of 96 tokens were seen to part at up to
# 0.04 (bfloat16) and 0.003 (float16), on a model of 30 layers; in float32, rounding moves logits by about 1e-5.
TIES = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}
TIE = TIES["float32"]


class Difference(NamedTuple):
    """The first new token at which two texts of one prompt disagree.

    Attributes:
        row: the prompt's place in its batch.
        new_token: which new token, from 0.
        expected: the first text's id there; None where that text had ended.
        found: the second text's.
        gap: between the two best logits of the full model, reading the text so far, in standard deviations of its
            logits.
        shortfall: how far the lower of the two ids' logits lies below the best one, in the same unit; infinite where
            one text had ended. Usually it is the gap; a text with a token that is not even second falls shorter.
    """

    row: int
    new_token: int
    expected: int | None
    found: int | None
    gap: float
    shortfall: float

    def is_tie(self, dtype: Any) -> bool:
        """Whether rounding explains it, for weights of this dtype: both ids within :data:`TIES` of the best logit."""
        return self.shortfall < tie_bound(dtype)

    def to_dict(self, first: str, second: str, dtype: Any) -> dict[str, Any]:
        """For JSON; the ids under the names of who wrote the texts."""
        where = {"prompt": self.row, "new_token": self.new_token}
        return where | {first: self.expected, second: self.found, "gap": self.gap, "tie": self.is_tie(dtype)}

    def explain(self, first: str, second: str, dtype: Any, decode: Callable[[Sequence[int]], str] | None = None) -> str:
        """In words, prompts and tokens counted from 1.

        Args:
            first: who wrote the first text.
            second: who wrote the second.
            dtype: the weights'.
            decode: a tokenizer's.
        """

        def name(token: int | None) -> str:
            if token is None:
                return "the end"
            return f"id {token}" if decode is None else f"{decode([token])!r} (id {token})"

        judged = "a tie that rounding decides" if self.is_tie(dtype) else "more than rounding explains"
        text = (
            f"new token {self.new_token + 1} of prompt {self.row + 1}: {first} {name(self.expected)}, "
            f"{second} {name(self.found)}. The full model's two best logits there are {self.gap:.1e} of the logits' "
            f"standard deviation apart: {judged} ({jnp.dtype(dtype)}: less than {tie_bound(dtype):.0e} is a tie)."
        )
        if self.is_tie(dtype) or jax.default_backend() == "cpu" or jnp.dtype(dtype) != jnp.float32:
            return text
        return f"{text} Accelerators round float32 products more coarsely: set JAX_DEFAULT_MATMUL_PRECISION=highest."


def tie_bound(dtype: Any) -> float:
    """The shortfall below which two texts part at a tie, for weights of this dtype; see :data:`TIES`."""
    return TIES.get(str(jnp.dtype(dtype)), TIE)


def parting(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """The first index at which two rows of ids differ, maybe the end of the shorter one; None where they are equal."""
    pairs = zip(expected, found, strict=False)
    at = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
    if at is None and len(expected) != len(found):
        return min(len(expected), len(found))
    return at


def differences(
    params: Model,
    prompts: Sequence[Any],
    expected: Sequence[Sequence[int]],
    found: Sequence[Sequence[int]],
    *,
    capacity: int | None = None,
) -> list[Difference]:
    """Every prompt whose two texts part, and how near to a tie the full model is there (one teacher-forced pass each).

    Args:
        params: the model.
        prompts: each prompt's ids, a list or array.
        expected: new tokens after each prompt: by autoregressive decoding, say.
        found: the same by what is to be checked.
        capacity: static; what the texts were generated with, where longrope's factors depend on it. None: it does not
            matter, or the text's own length.
    """
    parted = []
    for row, (prompt, left, right) in enumerate(zip(prompts, expected, found, strict=True)):
        at = parting(left, right)
        if at is None:
            continue
        here, there = (int(text[at]) if at < len(text) else None for text in (left, right))
        logits = next_logits(params, np.concatenate([prompt, left[:at]]).astype(np.int32), capacity=capacity)
        second, best = np.sort(logits)[-2:]
        lowest = -np.inf if here is None or there is None else min(logits[here], logits[there])
        gap, shortfall = (float((best - other) / logits.std()) for other in (second, lowest))
        parted.append(Difference(row, at, here, there, gap, shortfall))
    return parted


def next_logits(params: Model, tokens: np.ndarray, *, capacity: int | None = None) -> np.ndarray:
    """The full model's logits after the last of these tokens, float32 ``[vocab]``; few lengths compile.

    Args:
        params: the model.
        tokens: int32 ``[length]``, concrete.
        capacity: as of :func:`differences`.
    """
    if params.config.short_length is None:
        capacity = None  # without longrope it changes nothing, and would compile for each length
    elif capacity is None:
        capacity = len(tokens)
    return np.asarray(_logits_at(params, to_bucket(tokens[None]), np.int32(len(tokens) - 1), capacity))


@functools.partial(jax.jit, static_argnums=3)
def _logits_at(params: Model, tokens: jax.Array, position: jax.Array, capacity: int | None) -> jax.Array:
    hidden, _ = params.run_layers(params.embed(tokens), (), 0, capacity=capacity)
    return params.logits(jnp.take(hidden[0], position, axis=0))
