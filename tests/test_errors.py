"""Bad input gets one clear error, early, that says what was expected and what came."""

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import CONFIG
from support import random_params

import lsjax

TOKENS = np.arange(1, 13).reshape(2, 6)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, seed=0)


GENERATE = [
    ({"exit_layer": 0}, "exit_layer: expected a layer in 1..4, got 0"),
    ({"exit_layer": 5}, "exit_layer: expected a layer in 1..4, got 5"),
    ({"exit_layer": 2.5}, "exit_layer: expected a layer in 1..4, got 2.5"),
    ({"exit_layer": True}, "exit_layer: expected a layer in 1..4, got True"),
    ({"strategy": "early_exit"}, "exit_layer: expected a layer in 1..4 for strategy 'early_exit', got None"),
    ({"strategy": "beam"}, "strategy: expected one of self_speculative, early_exit, autoregressive, got 'beam'"),
    ({"exit_layer": 2, "num_speculations": -1}, "num_speculations: expected an int of at least 0, got -1"),
    ({"max_new_tokens": 0}, "max_new_tokens: expected an int of at least 1, got 0"),
    ({"max_new_tokens": 1.5}, "max_new_tokens: expected an int of at least 1, got 1.5"),
    ({"capacity": 10, "max_new_tokens": 5}, r"capacity: expected at least 11 tokens \(prompt and new ones\), got 10"),
    ({"prompt_lengths": [6, 0]}, r"expected 1..6 tokens a row, got an empty prompt in row 1"),
    ({"prompt_lengths": [7, 6]}, r"expected 1..6 tokens a row, got 7 in row 0"),
    ({"prompt_lengths": [6]}, r"prompt_lengths: expected integers of shape \(2,\), got \(1,\)"),
    ({"attention_mask": [[1, 1, 0, 1, 1, 1], [1] * 6]}, "expected 0 and 1, rows padded on the left or on the right"),
    ({"attention_mask": [[0, 1, 1, 1, 1, 0], [1] * 6]}, "padded on the left or on the right, got .* in row 0"),
    ({"attention_mask": [[1] * 5, [1] * 5]}, r"attention_mask: expected the shape of tokens \(2, 6\), got \(2, 5\)"),
    ({"attention_mask": [[0] * 6, [1] * 6]}, "got an empty prompt in row 0"),
    ({"attention_mask": [[1] * 6] * 2, "prompt_lengths": [6, 6]}, "prompt_lengths or attention_mask, not both"),
    ({"eos_token_id": -2}, "eos_token_id: expected token ids of at least 0, got -2"),
    ({"attention_mask": [[0.0, -1e9] * 3] * 2}, "expected 0 and 1, rows padded on the left or on the right"),
    ({"attention_mask": [[1] * 6, [1]]}, "attention_mask: expected an array, got rows of unequal length"),
    ({"attention_mask": "ones"}, "attention_mask: expected integers, got str"),
    ({"prompt_lengths": "six"}, "prompt_lengths: expected integers, got str"),
    ({"prompt_lengths": [3.0, 4.0]}, "prompt_lengths: expected integers, got float64"),
    ({"prompt_lengths": [3, 4, 5]}, r"prompt_lengths: expected integers of shape \(2,\), got \(3,\)"),
    ({"exit_layer": np.array(2.7)}, r"exit_layer: expected a layer in 1..4, got array\(2.7\)"),
    ({"exit_layer": np.array([2])}, r"exit_layer: expected a layer in 1..4, got array\(\[2\]\)"),
    ({"max_new_tokens": jnp.float32(2)}, "max_new_tokens: expected an int of at least 1, got Array"),
    ({"eos_token_id": 2**40}, "eos_token_id: expected token ids of at least 0, got 1099511627776"),
    ({"eos_token_id": [1.5]}, r"eos_token_id: expected token ids of at least 0, got \[1.5\]"),
    ({"eos_token_id": "</s>"}, "eos_token_id: expected token ids of at least 0, got '</s>'"),
    ({"pad_token_id": -1}, r"pad_token_id: expected token ids of at least 0, got \[-1\]"),
]


@pytest.mark.parametrize(("options", "message"), GENERATE)
def test_generate_refuses(params, options, message):
    with pytest.raises(ValueError, match=message):
        lsjax.generate(params, TOKENS, **options)


TOKEN_ERRORS = [
    ([], r"expected at least one token a row, got an empty prompt of shape \(0,\)"),
    ([[], []], r"got an empty prompt of shape \(2, 0\)"),
    ([[1, 2], [3]], "pad unequal prompts and give prompt_lengths or attention_mask"),
    ([[1.0, 2.0]], "expected integers, got float64"),
    ("text", "tokens: expected integers, got str"),
    (None, "tokens: expected integers, got NoneType"),
    ({"input_ids": [1]}, "tokens: expected integers, got dict"),
    ([[[1]]], r"expected the shape \[length\] or \[batch, length\], got \(1, 1, 1\)"),
    (5, r"expected the shape \[length\] or \[batch, length\], got \(\)"),
    ([[1, 251]], "expected ids in 0..250, got 251 at row 0, position 1"),
    ([[1, 2], [-1, 3]], "expected ids in 0..250, got -1 at row 1, position 0"),
]


@pytest.mark.parametrize(("tokens", "message"), TOKEN_ERRORS)
def test_tokens_are_refused_by_every_entry(params, tokens, message):
    for function in (lsjax.generate, lsjax.prefill, lsjax.forward, lsjax.score):
        with pytest.raises(ValueError, match=message):
            function(params, tokens)


def test_a_bare_tree_is_refused_by_every_entry(params):
    for function in (lsjax.generate, lsjax.prefill, lsjax.forward, lsjax.score):
        with pytest.raises(TypeError, match=r"params: expected lsjax\.Params, .* got dict"):
            function(params.tree, TOKENS)


def test_forward_refuses(params):
    for options, message in [
        ({"num_layers": 0}, "num_layers: expected a layer in 1..4, got 0"),
        ({"exits": (1, 9)}, "exits: expected a layer in 1..4, got 9"),
        ({"exits": ()}, "exits: expected at least one layer"),
        ({"exits": (1,), "num_layers": 2}, "num_layers or exits, not both"),
    ]:
        with pytest.raises(ValueError, match=message):
            lsjax.forward(params, TOKENS, **options)


def test_prefill_refuses(params):
    state = lsjax.prefill(params, TOKENS, capacity=16, exit_layer=2)
    refused: list[tuple[Any, str]] = [
        ({"exit_layer": 3}, "a state that is continued keeps its options"),
        ({"max_new_tokens": 5}, r"capacity: expected at least 17 tokens .*, got 16"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an int of at least 1, got 0"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            lsjax.prefill(params, TOKENS, state=state, **options)
    with pytest.raises(ValueError, match="expected the state's 2 rows, got 1"):
        lsjax.prefill(params, TOKENS[0], state=state)
    narrow: list[dict[str, Any]] = [{"capacity": 6}, {"capacity": 5, "prompt_lengths": [1, 2]}]
    for options in narrow:
        with pytest.raises(ValueError, match=r"capacity: expected at least [67] tokens"):
            lsjax.prefill(params, TOKENS, **options)
    with pytest.raises(ValueError, match=r"num_layers: expected a layer in 1\.\.4, got 5"):
        lsjax.draft(params, state, num_layers=5)
    shallow = lsjax.prefill(params, TOKENS, capacity=16, exit_layer=2, strategy="early_exit")
    with pytest.raises(ValueError, match="expected at most the state's 2 layers, got 3"):
        lsjax.draft(params, shallow, num_layers=3)


def test_a_traced_limit_is_refused_by_name(params):
    with pytest.raises(TypeError, match="max_new_tokens must be a Python int"):
        jax.jit(lambda n: lsjax.generate(params, TOKENS, max_new_tokens=n))(3)


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (TOKENS[0], {"prompt_lengths": [3, 4, 5]}, r"prompt_lengths: expected integers of shape \(1,\), got \(3,\)"),
        (TOKENS[:1], {"prompt_lengths": [3, 4, 5]}, r"prompt_lengths: expected integers of shape \(1,\), got \(3,\)"),
        (TOKENS[0], {"attention_mask": [[1] * 6] * 2}, r"attention_mask: expected the shape of tokens \(1, 6\)"),
        (TOKENS[:, :1], {"attention_mask": [[1] * 6] * 2}, r"attention_mask: expected the shape of tokens \(2, 1\)"),
    ],
)
def test_lengths_and_masks_are_never_broadcast(params, tokens, options, message):
    with pytest.raises(ValueError, match=message):
        lsjax.generate(params, tokens, **options)


def test_traced_static_options_are_refused_by_name(params):
    for name in ("exit_layer", "num_speculations", "capacity"):
        with pytest.raises(TypeError, match=f"{name} must be a Python int"):
            jax.jit(lambda n, name=name: lsjax.generate(params, TOKENS, **{"exit_layer": 2, name: n}))(3)


def test_a_spent_or_foreign_state_is_refused(params):
    state = lsjax.prefill(params, TOKENS, capacity=16, exit_layer=2)
    lsjax.decode_round(params, state)
    for function in (lsjax.decode_round, lambda params, state: lsjax.prefill(params, TOKENS, state=state)):
        with pytest.raises(ValueError, match="its cache went into decode_round"):
            function(params, state)
    deeper = random_params(dataclasses.replace(CONFIG, num_hidden_layers=5), seed=0)
    coarser = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    state = lsjax.prefill(params, TOKENS, capacity=16, exit_layer=2)
    for other in (deeper, coarser):
        for function in (lsjax.decode_round, lsjax.draft):
            with pytest.raises(ValueError, match="state: expected one of this model"):
                function(other, state)
    with pytest.raises(TypeError, match=r"state: expected a DecodeState, .* got tuple"):
        lsjax.decode_round(params, cast(Any, (1, 2)))


def test_traced_ids_outside_the_vocabulary_read_its_nearest_end(params):
    inside = jax.jit(lambda tokens: lsjax.forward(params, tokens))
    np.testing.assert_array_equal(inside(jnp.array([-5, 3, 400])), inside(jnp.array([0, 3, 250])))


def test_a_warning_past_the_trained_length(params):
    short = lsjax.Params(dataclasses.replace(CONFIG, max_position_embeddings=10), params.tree)
    with pytest.warns(UserWarning, match="11 tokens .* exceed .* max_position_embeddings=10") as caught:
        lsjax.generate(short, TOKENS, max_new_tokens=5)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="max_position_embeddings=10") as caught:
        state = lsjax.prefill(short, TOKENS, max_new_tokens=5)
    assert caught[0].filename == __file__
    with pytest.warns(UserWarning, match="max_position_embeddings=10") as caught:
        lsjax.prefill(short, TOKENS[:, :1], state=state, max_new_tokens=4)
    # What counts is the rows' own length, not their padding's.
    lsjax.generate(short, TOKENS, prompt_lengths=[5, 4], max_new_tokens=5)
    assert caught[0].filename == __file__


def test_the_checkpoints_own_special_ids_are_the_default(params):
    first = int(lsjax.generate(params, TOKENS[0], max_new_tokens=1, eos_token_id=()).tokens[-1])
    own = lsjax.Params(dataclasses.replace(CONFIG, eos_token_id=(9, first), pad_token_id=3), params.tree)
    out = lsjax.generate(own, TOKENS[0], max_new_tokens=4)
    assert out.tokens[6:].tolist() == [first, 3, 3, 3]
    assert out.lengths == 7
    assert lsjax.generate(own, TOKENS[0], max_new_tokens=4, eos_token_id=()).lengths == 10
