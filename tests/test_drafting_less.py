"""Shorter drafts, and drafts of fewer ids: the text stays the same."""

import dataclasses

import jax
import numpy as np
import pytest
from oracle import CONFIG
from plain_decoding import DATA, NEW, ROWS, generate
from support import random_params

import lsjax

pytestmark = pytest.mark.usefixtures("fewer_optimizations")


@pytest.mark.parametrize("sampling", [{}, {"key": jax.random.key(2), "temperature": 0.0}])
def test_drafting_ends_below_a_confidence(sampling):
    expected = generate(**sampling)
    drafted = []
    for threshold in (0.0, 0.2, 0.5, 1.0):
        found = generate(confidence_threshold=threshold, **sampling)
        np.testing.assert_array_equal(found.tokens, expected.tokens)
        drafted.append(int(np.sum(found.stats.drafted)))
        if threshold == 1.0:  # a draft and no more
            assert int(np.max(found.stats.accept_histogram[:, 2:])) == 0
    assert drafted[0] == int(np.sum(expected.stats.drafted))
    assert drafted == sorted(drafted, reverse=True)
    assert drafted[-1] < drafted[0]
    rows = generate(confidence_threshold=np.array([0.0, 1.0] * 4), **sampling)
    np.testing.assert_array_equal(rows.tokens, expected.tokens)
    np.testing.assert_array_equal(rows.stats.drafted[::2], expected.stats.drafted[::2])


def test_drafting_ends_with_the_last_row_that_goes_on():
    """The draft's loop takes no more steps than some row has use for."""
    state = lsjax.prefill(
        DATA.params, DATA.prompts[ROWS], prompt_lengths=DATA.lengths[ROWS], exit_layer=2, confidence_threshold=1.0
    )
    drafted = lsjax.draft(DATA.params, state)
    assert (np.asarray(drafted.counts) == 1).all()
    assert (np.asarray(drafted.hidden)[:, 2:] == 0).all()
    assert (np.asarray(drafted.hidden)[:, :2] != 0).any(axis=-1).all()


def test_the_heuristic_schedule_is_transformers():
    expected = generate()
    state = lsjax.prefill(
        DATA.params,
        DATA.prompts[ROWS],
        prompt_lengths=DATA.lengths[ROWS],
        exit_layer=2,
        num_speculations=4,
        max_new_tokens=NEW,
        eos_token_id=(),
        num_speculations_schedule="heuristic",
    )
    lengths, moves = np.full(8, 4), set()
    while bool(state.active):
        before = state
        state = lsjax.decode_round(DATA.params, state)
        drafted = np.minimum(lengths, np.maximum(np.asarray(before.limits) - np.asarray(before.lengths) - 1, 0))
        drafted = np.where(before.done, 0, drafted)
        kept = np.asarray(state.stats.accepted) - np.asarray(before.stats.accepted)
        new = np.where(kept == drafted, np.minimum(lengths + 2, 4), np.maximum(lengths - 1, 1))
        moves |= set((new - lengths)[drafted > 0].tolist())
        lengths = np.where(drafted > 0, new, lengths)
        np.testing.assert_array_equal(state.draft_lengths, lengths)
    assert {-1, 0, 2} <= moves
    np.testing.assert_array_equal(np.asarray(state.tokens)[:, : 12 + NEW], expected.tokens)
    found = generate(num_speculations_schedule="heuristic")
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert int(np.sum(found.stats.drafted)) == int(np.sum(state.stats.drafted))


@pytest.mark.parametrize("tied", [False, True])
def test_a_draft_vocabulary_changes_nothing_in_the_text(tied):
    params, prompts, lengths = DATA.params, DATA.prompts[ROWS], DATA.lengths[ROWS]
    if tied:
        params = random_params(dataclasses.replace(CONFIG, tie_word_embeddings=True), 5, deep_from=1, deep_scale=0.1)
    options = {"prompt_lengths": lengths, "exit_layer": 2, "max_new_tokens": NEW, "eos_token_id": ()}
    expected = lsjax.generate(params, prompts, **options)
    text = np.asarray(expected.tokens)
    prepared = lsjax.prepare(params)
    often = lsjax.prepare(params, draft_vocab=60, draft_text=text)
    assert often.draft_vocab_size == 60
    accepted = {}
    few = np.arange(0, CONFIG.vocab_size, 3)
    cases = {"all": prepared, "often": often, "few": lsjax.prepare(prepared, draft_vocab=few)}
    for name, each in cases.items():
        found = lsjax.generate(each, prompts, **options)
        np.testing.assert_array_equal(found.tokens, expected.tokens, err_msg=name)
        accepted[name] = int(np.sum(found.stats.accepted))
    assert accepted["all"] >= accepted["often"] > accepted["few"]
    state = lsjax.prefill(cases["few"], prompts, exit_layer=2)
    drafted = lsjax.draft(cases["few"], state)
    assert set(np.asarray(drafted.tokens).ravel().tolist()) <= set(few.tolist())
    # What it drafts is the most probable of its ids.
    logits = np.asarray(cases["few"].logits(drafted.hidden[:, :-1]))
    np.testing.assert_array_equal(drafted.tokens, few[logits[..., few].argmax(axis=-1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab": []}, "draft_vocab: expected at least one id, got none"),
        ({"draft_vocab": [251]}, r"draft_vocab: expected ids in 0\.\.250, got 251"),
        ({"draft_vocab": [-1, 3]}, r"draft_vocab: expected ids in 0\.\.250, got -1"),
        ({"draft_vocab": 252, "draft_text": [1]}, r"draft_vocab: expected an int in 1\.\.251, got 252"),
        ({"draft_vocab": 5}, "draft_text: expected a text's ids with draft_vocab=5, a count; got None"),
        ({"draft_vocab": [5], "draft_text": [1]}, "draft_vocab: expected a count with draft_text, got ids"),
        ({"draft_text": [1]}, "draft_text: expected a count as draft_vocab with it, got None"),
        ({"draft_vocab": [0.5]}, "draft_vocab: expected ids or a count of them, got float64"),
        ({"draft_vocab": 5, "draft_text": [999]}, r"draft_text: expected ids in 0\.\.250, got 999"),
    ],
)
def test_bad_draft_vocabularies_are_one_clear_error(options, message):
    with pytest.raises(ValueError, match=message):
        lsjax.prepare(DATA.params, **options)
