"""Scaled rotary positions against transformers and float64, and that whatever the type, a row is what it is alone."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    LLAMA3_ROPE,
    NumpyLlama,
    attention_factor,
    frequencies,
    quickly_compiled,
    random_params,
    transformers_config,
    transformers_model,
)

import lsjax
from lsjax.model.rope import attention_scaling, inverse_frequencies, rotation

pytestmark = pytest.mark.usefixtures("fewer_optimizations")

ORIGINAL = 32
CONFIG = lsjax.LlamaConfig(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-3,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.0, 9.0, 14.0, 20.0],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
forward = quickly_compiled(lsjax.forward)
UNIT = 2.0**-24  # half of float32's last place: one operation's rounding, relative


def scaled(rope: Any, config: lsjax.LlamaConfig = CONFIG, **changes) -> lsjax.LlamaConfig:
    if rope is not None and rope["rope_type"] == "dynamic":
        changes = {"max_position_embeddings": ORIGINAL, **changes}
    return dataclasses.replace(config, **{"rope_theta": 10000.0, **changes}, rope_scaling=rope)


def wide(rope: Any) -> lsjax.LlamaConfig:
    """A configuration of real sizes: heads of 64, a context of 131,072 tokens."""
    if rope is not None and rope["rope_type"] == "longrope":
        lists = {"short_factor": np.linspace(1, 2, 32).tolist(), "long_factor": np.linspace(1, 40, 32).tolist()}
        rope = {**rope, **lists}
    if rope is not None and "original_max_position_embeddings" in rope:
        rope = {**rope, "original_max_position_embeddings": 4096}
    trained = 4096 if rope is not None and rope["rope_type"] == "dynamic" else 131072
    sizes = {"hidden_size": 256, "head_dim": 64, "max_position_embeddings": trained, "rope_theta": 500000.0}
    return dataclasses.replace(CONFIG, **sizes, rope_scaling=rope and {**rope, "rope_theta": 500000.0})


KINDS: dict[str, Any] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": LLAMA3_ROPE,
    "dynamic": DYNAMIC,
    "yarn": {**YARN, "factor": 32.0},
    "yarn, not truncated": {**YARN, "factor": 32.0, "truncate": False, "beta_fast": 24.0, "beta_slow": 1.5},
    "yarn, mscale": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, attention factor": {**YARN, "factor": 32.0, "attention_factor": 1.25, "mscale": 0.7},
    "longrope": LONGROPE,
    "longrope, factor": {**LONGROPE, "factor": 16.0},
    "longrope, attention factor": {**LONGROPE, "attention_factor": 1.25},
}


@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_and_attention_scaling_equal_transformers(kind):
    torch = pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = wide(KINDS[kind])
    embedding = LlamaRotaryEmbedding(transformers_config(config))
    assert attention_scaling(config) == embedding.attention_scaling
    # torch's pow is off by at most one unit in the last place (two of ours), and what follows rounds it anew.
    np.testing.assert_allclose(inverse_frequencies(config), embedding.inv_freq.numpy(), rtol=4 * UNIT)
    for length in (4096, 4097):
        embedding(torch.zeros(1), torch.arange(length)[None])
        if "dynamic" not in kind or length == 4096:  # past its trained length the next test but one
            expected = embedding.inv_freq.numpy()
            np.testing.assert_allclose(inverse_frequencies(config, length), expected, rtol=4 * UNIT)
    # A list for long texts that differs is a list that is used.
    assert ("longrope" in kind) == (inverse_frequencies(config, 4097) != inverse_frequencies(config, 4096)).any()


def frequency_units(config: lsjax.LlamaConfig) -> np.ndarray:
    """A bound on each frequency's relative error in units of ``UNIT``, from the roundings that make it."""
    plain = 3.0  # theta's power and its reciprocal, one unit each, and their second-order terms
    kind, factor = getattr(config.rope_scaling, "rope_type", None), getattr(config.rope_scaling, "factor", 1.0)
    if kind in ("linear", "longrope"):
        return np.array(plain + 2)  # the factor, and the division or product with it
    if kind == "llama3":  # the blend's share errs by its own five roundings, and weighs the two ends' distance
        return np.array(plain + 3 + 5 * factor)
    if kind == "yarn":  # likewise, the share having four roundings of numbers up to 1 and of channel numbers
        return np.array(plain + 3 + 4 * factor)
    return np.array(plain)


@pytest.mark.parametrize("kind", KINDS)
def test_angles_are_right_to_float32_up_to_position_131071(kind):
    config, length = wide(KINDS[kind]), 131072
    edges = [4094, 4095, 4096, 4097, 65535, 131070, 131071]
    positions = np.unique(np.r_[np.arange(0, length, 509), edges])
    exact = frequencies(config, positions, length)
    stored = inverse_frequencies(config, length)
    assert stored.dtype == np.float32
    if "dynamic" not in kind:
        assert (np.abs(stored / exact[0] - 1) <= frequency_units(config) * UNIT).all()
    # An angle is a position (exact) times a frequency: it errs by the frequency's own relative error and by one
    # rounding more, both in proportion to the angle, so by up to 131,071 * 2^-24 = 0.008 radians for each of these.
    units = np.abs(stored / frequencies(config, 0, length) - 1) / UNIT + 1
    if "dynamic" in kind:  # the base grows in float32 too: f * exp(-log1p(x) * share), L = log1p(x)
        grown = np.log(frequencies(config, 0) / exact)  # L * share
        units = units + 3 + 2 + 5 * grown  # x rounded twice; product, share, logarithm (of L), exp and product
    bound = positions[:, None] * exact * units * UNIT + 4 * UNIT  # and the cosine itself
    factor = attention_factor(config)
    angles = positions[:, None] * exact
    for found, expected in zip(rotation(config, jnp.asarray(positions), length), (np.cos, np.sin), strict=True):
        assert found.dtype == jnp.float32
        error = np.abs(np.asarray(found, np.float64) - factor * expected(angles))
        assert (error <= 1.01 * factor * bound).all()
    assert bound.max() < 0.05


def tokens(length: int, batch: int = 2) -> np.ndarray:
    return np.random.default_rng(length).integers(0, CONFIG.vocab_size, (batch, length))


def torch_logits(model, rows: np.ndarray, cached: bool = False) -> np.ndarray:
    """Logits of whole rows at once, or of one token after the other through transformers' cache."""
    import torch
    import transformers

    with torch.no_grad():
        if not cached:
            return model(torch.tensor(rows)).logits.numpy()
        cache = transformers.DynamicCache()
        found = [model(column[:, None], None, None, cache).logits for column in torch.tensor(rows).T]
        return torch.cat(found, dim=1).numpy()


@pytest.mark.parametrize("kind", ["yarn", "yarn, mscale", "longrope", "dynamic"])
def test_logits_equal_transformers_on_both_sides_of_the_original_length(kind):
    pytest.importorskip("torch")
    rope = {"yarn": YARN, "yarn, mscale": {**YARN, "mscale": 2.0, "mscale_all_dim": 0.5}, "longrope": LONGROPE}
    params = random_params(scaled(rope.get(kind, DYNAMIC)), seed=1)
    oracle = NumpyLlama(params)
    found = None
    for length in (60,) if "yarn" in kind else (ORIGINAL, 60):
        found = forward(params, tokens(length))
        model = transformers_model(params)
        expected = torch_logits(model, tokens(length), cached=kind == "dynamic" and length > ORIGINAL)
        assert expected.std() >= 1
        assert np.abs(found - expected).max() < 1e-4
        assert np.abs(found - oracle.logits(tokens(length))).max() < 1e-4
    # The scaling is no ornament: without it the logits are others.
    assert found is not None
    plain = lsjax.Params(scaled(None), params.tree)
    assert np.abs(found - forward(plain, tokens(60))).max() > 0.1


PROGRAM: Any = {"exit_layer": 1, "num_speculations": 3, "eos_token_id": ()}


def text_model(rope: Any) -> lsjax.Params:
    return random_params(scaled(rope), seed=2, deep_from=1, deep_scale=0.3)


def check_text(params, prompts, lengths, new: int, found, length: int) -> None:
    """Generated rows are those of full forwards in float64, and of our own teacher-forced forward."""
    text, margins = NumpyLlama(params, length).generate(prompts, lengths, new)
    assert margins.min() > 1e-4  # no ties of rounding among these
    for row, start in enumerate(lengths):
        np.testing.assert_array_equal(found.tokens[row, : start + new], text[row, : start + new])
    assert (found.lengths == lengths + new).all()
    np.testing.assert_array_equal(found.tokens[:, lengths.max() + new :], 0)


@pytest.mark.parametrize("kind", ["yarn", "dynamic"])
def test_speculation_is_lossless_past_the_original_length(kind):
    params = text_model({"yarn": YARN, "dynamic": DYNAMIC}[kind])
    prompts, lengths = tokens(16, batch=3), np.array([16, 9, 12])
    prompts = np.where(np.arange(16) < lengths[:, None], prompts, 0)
    program = functools.partial(lsjax.generate, prompt_lengths=lengths, max_new_tokens=40, **PROGRAM)
    out = quickly_compiled(program)(params, prompts)
    check_text(params, prompts, lengths, 40, out, 56)
    assert 0 < out.stats.accepted.sum() < out.stats.drafted.sum()
    logits = forward(params, out.tokens[:1])
    np.testing.assert_array_equal(logits[0, 15:-1].argmax(-1), out.tokens[0, 16:])


def test_longrope_takes_one_list_for_a_whole_text_by_what_it_may_come_to():
    params = text_model(LONGROPE)
    prompts, lengths = tokens(14, batch=2), np.array([14, 14])
    short = lsjax.generate(params, prompts, max_new_tokens=18, **PROGRAM)  # 32 tokens: just within
    check_text(params, prompts, lengths, 18, short, ORIGINAL)
    long = lsjax.generate(params, prompts, max_new_tokens=19, **PROGRAM)  # 33: long factors from the first token on
    check_text(params, prompts, lengths, 19, long, ORIGINAL + 1)
    assert (short.tokens[:, 14:] != long.tokens[:, 14:-1]).any()
    # forward, which takes a text's width for what it may come to, agrees with either.
    for out in (short, long):
        logits = forward(params, out.tokens)
        np.testing.assert_array_equal(logits[:, 13:-1].argmax(-1), out.tokens[:, 14:])
    # A capacity decides instead: short texts as a long one begins.
    begun = lsjax.generate(params, prompts, max_new_tokens=18, capacity=64, **PROGRAM)
    np.testing.assert_array_equal(begun.tokens, long.tokens[:, :-1])


@pytest.mark.slow
def test_a_longrope_row_alone_in_rounds_and_continued_is_that_row():
    params, prompts = text_model(LONGROPE), tokens(14, batch=2)
    long = lsjax.generate(params, prompts, max_new_tokens=19, **PROGRAM)
    alone = lsjax.generate(params, prompts[0], max_new_tokens=19, **PROGRAM)
    np.testing.assert_array_equal(alone.tokens, long.tokens[0])
    compiled = quickly_compiled(lambda p, t: lsjax.generate(p, t, max_new_tokens=19, **PROGRAM).tokens)
    np.testing.assert_array_equal(compiled(params, prompts), long.tokens)
    state = lsjax.prefill(params, prompts[0, :9], capacity=64, **PROGRAM)
    state = lsjax.prefill(params, prompts[0, 9:], state=state, max_new_tokens=19)
    while state.active:
        state = lsjax.decode_round(params, state)
    np.testing.assert_array_equal(state.tokens[0, :33], long.tokens[0])


def test_longrope_refuses_what_would_make_a_row_depend_on_its_neighbours():
    params = text_model(LONGROPE)
    prompts, lengths = tokens(14, batch=2), np.array([14, 5])
    words = r"may come to 24 and to 33 tokens .* original_max_position_embeddings=32, .* or give capacity="
    with pytest.raises(ValueError, match=words):
        lsjax.generate(params, prompts, prompt_lengths=lengths, max_new_tokens=19, **PROGRAM)
    with pytest.raises(ValueError, match=words):
        lsjax.prefill(params, prompts, prompt_lengths=lengths, max_new_tokens=19, **PROGRAM)
    # A short text never grows into a long one, whatever its cache's bucket would hold.
    state = lsjax.prefill(params, prompts, max_new_tokens=10, **PROGRAM)
    assert state.capacity == ORIGINAL
    with pytest.raises(ValueError, match=r"capacity: expected at least 38 tokens .* got 32"):
        lsjax.prefill(params, prompts, state=state, max_new_tokens=10)
    # Two equal lists turn every text alike, so nothing is refused.
    alike = {**LONGROPE, "short_factor": LONGROPE["long_factor"]}
    same = lsjax.Params(scaled(alike), params.tree)
    out = jax.eval_shape(lambda p: lsjax.generate(p, prompts, prompt_lengths=lengths, max_new_tokens=19), same)
    assert out.tokens.shape == (2, 33)


def test_dynamic_texts_are_warned_of_only_past_the_stretched_length():
    params = lsjax.Params.abstract(scaled(DYNAMIC))
    assert params.config.trained_length == 4 * ORIGINAL
    prompt = np.zeros(100, np.int32)
    jax.eval_shape(lambda p: lsjax.generate(p, prompt, max_new_tokens=28), params)
    with pytest.warns(UserWarning, match="129 tokens .* max_position_embeddings=32 times the factor"):
        jax.eval_shape(lambda p: lsjax.generate(p, prompt, max_new_tokens=29), params)
