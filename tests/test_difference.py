"""Where texts part, and whether it is a tie: against float64 forwards."""

import dataclasses

import jax
import numpy as np
import pytest
from support import LLAMA3_ROPE, NumpyLlama, compiled_programs, random_params

import lsjax
from lsjax.measure.difference import TIES, Difference, _logits_at, differences, next_logits, parting

CONFIG = lsjax.LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_scaling=LLAMA3_ROPE,
)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, 1)


@pytest.mark.parametrize(
    ("left", "right", "at"),
    [([1, 2], [1, 2], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([4], [], 0), ([], [], None)],
)
def test_where_rows_part(left, right, at):
    assert parting(left, right) == at
    assert parting(right, left) == at


def test_the_gap_is_that_of_the_full_model_reading_the_text_so_far(params):
    texts = [[11, 12, 13, 14], [21, 22], [31, 32, 33]]
    oracle = NumpyLlama(params).logits(np.array([[*PROMPTS[2], 31, 32]]))[0, -1]
    order = np.argsort(oracle)
    best, second, third = (int(index) for index in order[::-1][:3])
    changed = [texts[0], [21, 22, 23], [31, 32, third]]
    texts[2][2] = second
    ended, parted = differences(params, PROMPTS, texts, changed)
    assert (ended.row, ended.new_token, ended.expected, ended.found) == (1, 2, None, 23)
    assert (parted.row, parted.new_token, parted.expected, parted.found) == (2, 2, second, third)
    assert parted.gap == pytest.approx((oracle[best] - oracle[second]) / oracle.std(), rel=1e-3)
    assert parted.shortfall == pytest.approx((oracle[best] - oracle[third]) / oracle.std(), rel=1e-3)
    assert ended.gap > 0
    assert ended.shortfall == np.inf
    assert not ended.is_tie("float32")


def test_a_tie_wants_both_tokens_near_the_best():
    near = Difference(row=0, new_token=0, expected=1, found=2, gap=5e-5, shortfall=5e-5)
    assert near.is_tie("float32")
    assert not near._replace(shortfall=1.0).is_tie("float32")  # the gap is small, but one text has a third token
    for dtype, bound in TIES.items():
        assert near._replace(shortfall=0.9 * bound).is_tie(dtype)
        assert not near._replace(shortfall=1.1 * bound).is_tie(np.dtype(dtype) if dtype != "bfloat16" else dtype)


def test_in_words_and_for_json(monkeypatch):
    found = Difference(row=1, new_token=3, expected=7, found=None, gap=0.25, shortfall=np.inf)
    text = found.explain("plain", "drafted", "float32", lambda ids: f"<{ids[0]}>")
    assert text.startswith("new token 4 of prompt 2: plain '<7>' (id 7), drafted the end. ")
    assert "2.5e-01 of the logits' standard deviation apart: more than rounding explains" in text
    assert "JAX_DEFAULT_MATMUL_PRECISION" not in text
    tie = found._replace(found=9, shortfall=0.05)
    assert "plain id 7, drafted id 9" in tie.explain("plain", "drafted", "bfloat16")
    assert "a tie that rounding decides (bfloat16: less than 1e-01 is a tie)" in tie.explain("a", "b", "bfloat16")
    assert found.to_dict("plain", "drafted", "float32") == {
        "prompt": 1,
        "new_token": 3,
        "plain": 7,
        "drafted": None,
        "gap": 0.25,
        "tie": False,
    }
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "JAX_DEFAULT_MATMUL_PRECISION=highest" in found.explain("a", "b", "float32")
    assert "JAX_DEFAULT_MATMUL_PRECISION" not in found.explain("a", "b", "bfloat16")


def test_few_lengths_compile(params):
    before = compiled_programs(_logits_at)
    for length in range(17, 25):
        for capacity in (None, 40, 64):
            next_logits(params, np.arange(length, dtype=np.int32), capacity=capacity)
    assert compiled_programs(_logits_at) == before + 1


def test_under_longrope_the_capacity_decides(params):
    factors = {"rope_type": "longrope", "short_factor": (1.0,) * 4, "long_factor": (3.0,) * 4, "factor": 4.0}
    scaling = factors | {"original_max_position_embeddings": 32}
    config = dataclasses.replace(CONFIG, rope_scaling=scaling)
    params, tokens = lsjax.Params(config, params.tree), np.arange(20, dtype=np.int32)
    for capacity, length in ((None, 20), (32, 32), (33, 33)):
        expected = NumpyLlama(params, length).logits(tokens[None])[0, -1]
        np.testing.assert_allclose(next_logits(params, tokens, capacity=capacity), expected, rtol=1e-4, atol=1e-4)
