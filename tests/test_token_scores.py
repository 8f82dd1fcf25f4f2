"""Log-probabilities of new tokens: those of the full model, with and without processors and filters."""

import itertools
from typing import Any

import jax
import numpy as np
import pytest
from plain_decoding import (
    DATA,
    EOS_OF_THE_MODEL,
    FORBIDDEN,
    NEW,
    ROWS,
    generate,
    oracle,
)

import lsjax
from lsjax import processors as ready

pytestmark = pytest.mark.usefixtures("fewer_optimizations")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("sampled", [False, True])
def test_scores_are_those_of_the_full_model(sampled):
    processors = [ready.RepetitionPenalty(1.3), ready.ForbiddenIds(FORBIDDEN)]
    options: dict[str, Any] = {
        "processors": processors,
        "top_n": 3,
        "log_probs": True,
        "eos_token_id": EOS_OF_THE_MODEL,
    }
    if sampled:
        options |= {"key": jax.random.key(0), "temperature": 0.8, "top_k": 40}
    found = generate(**options)
    scores: Any = found.scores
    tokens, lengths = np.asarray(found.tokens), np.asarray(found.lengths)
    logits = oracle().logits(tokens[:, :-1])
    column = np.arange(tokens.shape[1])
    written = (column >= DATA.lengths[ROWS][:, None]) & (column < lengths[:, None])
    assert written.sum(axis=1).min() < NEW
    ours = np.take_along_axis(log_softmax(logits), tokens[:, 1:, None], axis=-1)[..., 0]
    ours = np.pad(ours, ((0, 0), (1, 0)))
    np.testing.assert_allclose(np.where(written, ours, 0), scores.log_probs, atol=2e-4)
    for row, at in itertools.product(range(8), column):
        if not written[row, at]:
            assert scores.processed_log_probs[row, at] == 0
            assert (np.asarray(scores.top_tokens)[row, at] == -1).all()
            continue
        best = np.argsort(-logits[row, at - 1])[:3]
        np.testing.assert_array_equal(scores.top_tokens[row, at], best)
        np.testing.assert_allclose(scores.top_log_probs[row, at], log_softmax(logits[row, at - 1])[best], atol=2e-4)
        seen = np.unique(tokens[row, :at])
        changed = logits[row, at - 1].copy()
        changed[seen] = np.where(changed[seen] < 0, changed[seen] * 1.3, changed[seen] / 1.3)
        changed[FORBIDDEN] = -np.inf
        if sampled:
            changed = changed / 0.8
            changed[changed < np.sort(changed)[-40]] = -np.inf
        with np.errstate(invalid="ignore"):
            expected = log_softmax(changed)[tokens[row, at]]
        np.testing.assert_allclose(scores.processed_log_probs[row, at], expected, atol=5e-4)
    plain = generate(log_probs=True)
    assert plain.scores is not None
    np.testing.assert_array_equal(plain.scores.log_probs, plain.scores.processed_log_probs)
    assert plain.scores.top_tokens is None
    np.testing.assert_array_equal(plain.tokens, generate().tokens)
    # The teacher-forced scores of the same text are the same.
    text = lsjax.score(DATA.params, plain.tokens, prompt_lengths=plain.lengths)
    shown = np.where(column >= DATA.lengths[ROWS][:, None], text.log_probs, 0)
    np.testing.assert_allclose(plain.scores.log_probs, shown, atol=1e-4)


def test_scores_of_a_row_are_the_same_alone_and_under_vmap():
    together = generate(top_n=2, log_probs=True)
    row = int(np.argmax(DATA.lengths[ROWS]))
    length = DATA.lengths[row]

    def run(tokens) -> Any:
        options: Any = {"exit_layer": 2, "max_new_tokens": NEW, "eos_token_id": ()}
        return lsjax.generate(DATA.params, tokens, top_n=2, **options)

    alone = run(DATA.prompts[row, :length])
    assert alone.scores.log_probs.shape == (length + NEW,)
    cut = jax.tree.map(lambda x: np.asarray(x)[row, : length + NEW], together.scores)
    for ours, other in zip(jax.tree.leaves(alone.scores), jax.tree.leaves(cut), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-5)
    mapped = jax.vmap(run)(np.stack([DATA.prompts[row, :length]] * 2))
    np.testing.assert_allclose(mapped.scores.log_probs[1], alone.scores.log_probs, atol=1e-5)
