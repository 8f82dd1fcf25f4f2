"""Log-probabilities of texts against log-softmax in NumPy float64, and that no text's logits are ever held."""

import collections
import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import CONFIG as FOUR_LAYERS
from support import NumpyLlama, compiled_programs, random_params, temporaries_of

import lsjax
from lsjax.decode.score import POSITION_CHUNK, VOCAB_CHUNK, _score, _Sizes, _Texts
from lsjax.model.projection import dot

pytestmark = pytest.mark.usefixtures("fewer_optimizations")

CONFIG = dataclasses.replace(FOUR_LAYERS, num_hidden_layers=2)
VOCAB, WIDTH = CONFIG.vocab_size, 21
LENGTHS = np.array([21, 2, 9, 14])
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (4, WIDTH))
# Blocks that divide neither the vocabulary of 251 nor the 20 positions.
CHUNKS: Any = {"position_chunk": 12, "vocab_chunk": 60}


@pytest.fixture(scope="module")
def models():
    tied = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    params = {"untied": random_params(CONFIG, 0), "tied": random_params(tied, 1)}
    return params | {f"prepared {name}": lsjax.prepare(model) for name, model in params.items()}


@pytest.fixture(scope="module")
def params(models):
    return models["untied"]


def log_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def of_tokens(log_probs: np.ndarray, tokens=TOKENS, lengths=LENGTHS) -> np.ndarray:
    """``[batch, width, vocab]`` after every token, to that of each token before its end but the first, else 0."""
    chosen = np.take_along_axis(log_probs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    found = np.pad(chosen, ((0, 0), (1, 0)))
    return np.where(np.arange(tokens.shape[1]) < lengths[:, None], found, 0)


@pytest.mark.parametrize("name", ["untied", "tied", "prepared untied", "prepared tied"])
def test_log_probs_are_the_log_softmax_of_the_logits(models, name):
    plain = models[name.removeprefix("prepared ")]
    found = lsjax.score(models[name], TOKENS, prompt_lengths=LENGTHS, **CHUNKS)
    expected = of_tokens(log_softmax(NumpyLlama(plain).logits(TOKENS)))
    assert found.log_probs.shape == (4, WIDTH)
    assert found.log_probs.dtype == jnp.float32
    np.testing.assert_allclose(found.log_probs, expected, atol=1e-4)
    np.testing.assert_allclose(found.log_probs, of_tokens(log_softmax(lsjax.forward(models[name], TOKENS))), atol=1e-4)
    assert found.top_tokens is found.top_log_probs is None
    np.testing.assert_array_equal(found.lengths, LENGTHS)
    np.testing.assert_allclose(found.total_log_prob, expected.sum(1), rtol=1e-5)
    # Logarithms are off by up to 1e-4, so perplexities by that share.
    np.testing.assert_allclose(found.perplexity, np.exp(-expected.sum(1) / (LENGTHS - 1)), rtol=1e-4)


def test_depth(params):
    found = lsjax.score(params, TOKENS, num_layers=1)
    expected = of_tokens(log_softmax(NumpyLlama(params).logits(TOKENS, 1)), lengths=np.full(4, WIDTH))
    np.testing.assert_allclose(found.log_probs, expected, atol=1e-4)


def test_logits_of_thousands_neither_overflow_nor_vanish(params):
    tree = {**params.tree, "norm": {"scale": 1000 * params.tree["norm"]["scale"]}}
    found = lsjax.score(lsjax.Params(CONFIG, tree), TOKENS, **CHUNKS)
    expected = of_tokens(log_softmax(NumpyLlama(lsjax.Params(CONFIG, tree)).logits(TOKENS)), lengths=np.full(4, WIDTH))
    assert expected.min() < -3000
    np.testing.assert_allclose(found.log_probs, expected, rtol=1e-4, atol=0.1)


@pytest.mark.parametrize("chunks", [(1, 251), (10_000, 1000), (7, 250), (8, 1), (500, 126)])
def test_blocks_of_any_size_are_the_same(params, chunks):
    expected = lsjax.score(params, TOKENS, prompt_lengths=LENGTHS, top_n=5)
    sizes = dict(zip(("position_chunk", "vocab_chunk"), chunks, strict=True))
    found = lsjax.score(params, TOKENS, prompt_lengths=LENGTHS, top_n=5, **sizes)
    np.testing.assert_array_equal(found.top_tokens, expected.top_tokens)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)
    np.testing.assert_allclose(np.asarray(found.top_log_probs), np.asarray(expected.top_log_probs), atol=1e-5)


def test_rows_are_what_they_are_alone(params):
    batch = lsjax.score(params, TOKENS, prompt_lengths=LENGTHS, top_n=3, **CHUNKS)
    for row, length in enumerate(LENGTHS):
        alone = lsjax.score(params, TOKENS[row, :length], top_n=3, **CHUNKS)
        assert alone.log_probs.shape == (length,)
        assert alone.perplexity.shape == ()
        np.testing.assert_allclose(batch.log_probs[row, :length], alone.log_probs, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(batch.top_tokens)[row, :length], alone.top_tokens)
        np.testing.assert_allclose(
            np.asarray(batch.top_log_probs)[row, :length], np.asarray(alone.top_log_probs), atol=1e-5
        )
        np.testing.assert_allclose(batch.perplexity[row], alone.perplexity, rtol=1e-4)


def test_columns_are_the_caller_s_on_either_side_of_padding(params):
    right = np.arange(WIDTH) < LENGTHS[:, None]
    expected = lsjax.score(params, TOKENS, prompt_lengths=LENGTHS, top_n=3)
    where = {name: np.asarray(getattr(expected, name)) for name in ("log_probs", "top_tokens", "top_log_probs")}
    np.testing.assert_array_equal(where["log_probs"][~right], 0)
    np.testing.assert_array_equal(where["top_tokens"][~right], -1)
    np.testing.assert_array_equal(where["top_log_probs"][~right], 0)
    assert (where["top_tokens"][:, 0] == -1).all()
    assert (where["log_probs"][:, 1:][right[:, 1:]] < 0).all()

    texts = np.where(right, TOKENS, -100)  # an id that no vocabulary has
    left = np.array([np.roll(row, WIDTH - n) for row, n in zip(texts, LENGTHS, strict=True)])
    score = functools.partial(lsjax.score, params, top_n=3)
    masked = score(texts, attention_mask=right)
    turned = score(left, attention_mask=left >= 0)
    inside = jax.jit(lambda tokens: score(tokens, attention_mask=tokens >= 0))(left)
    for name, values in where.items():
        np.testing.assert_array_equal(getattr(masked, name), values)
        rolled = [np.roll(row, WIDTH - n, axis=0) for row, n in zip(values, LENGTHS, strict=True)]
        np.testing.assert_array_equal(getattr(turned, name), rolled)
        np.testing.assert_allclose(getattr(inside, name), rolled, atol=1e-5)
    np.testing.assert_array_equal(turned.lengths, LENGTHS)


@pytest.fixture(scope="module")
def tying():
    """A model whose logits are small whole numbers, exactly, so that many are equal."""
    config = lsjax.LlamaConfig(
        vocab_size=101,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        rms_norm_eps=1e-9,  # nothing beside 1
    )
    params = random_params(config, 0, deep_from=0, deep_scale=0.0)
    rng = np.random.default_rng(1)
    params.tree["embed_tokens"]["embedding"] = jnp.asarray(rng.choice([-1.0, 1.0], (101, 8)), jnp.float32)
    params.tree["norm"]["scale"] = jnp.ones(8)
    params.tree["lm_head"]["kernel"] = jnp.asarray(rng.integers(-1, 2, (8, 101)), jnp.float32)
    return params


@pytest.mark.parametrize("top_n", [1, 7, 30, 101])
def test_the_first_of_equals_comes_first(tying, top_n):
    tree = tying.tree
    tokens = np.random.default_rng(2).integers(0, 101, (2, 18))
    logits = np.asarray(tree["embed_tokens"]["embedding"])[tokens] @ np.asarray(tree["lm_head"]["kernel"])
    assert len(np.unique(logits)) < 20
    order = np.argsort(-logits[:, :-1], axis=-1, kind="stable")[..., :top_n]
    found = lsjax.score(tying, tokens, top_n=top_n, vocab_chunk=24, position_chunk=10)
    np.testing.assert_array_equal(np.asarray(found.top_tokens)[:, 1:], order)
    expected = np.take_along_axis(log_softmax(logits)[:, :-1], order, axis=-1)
    np.testing.assert_allclose(np.asarray(found.top_log_probs)[:, 1:], expected, atol=1e-5)


def test_what_generate_writes_is_the_most_probable(params):
    out = lsjax.generate(params, TOKENS[0, :8], exit_layer=1, max_new_tokens=12, eos_token_id=())
    found = lsjax.score(params, out.tokens, top_n=1)
    np.testing.assert_array_equal(np.asarray(found.top_tokens)[8:, 0], out.tokens[8:])
    np.testing.assert_array_equal(np.asarray(found.top_log_probs)[8:, 0], found.log_probs[8:])


def test_jit_and_vmap_over_texts_lengths_and_params(params):
    expected = lsjax.score(params, TOKENS, prompt_lengths=LENGTHS, top_n=3, **CHUNKS)

    def one(tokens, length):
        return lsjax.score(params, tokens, prompt_lengths=length, top_n=3, **CHUNKS)

    found = jax.jit(jax.vmap(one))(TOKENS, LENGTHS)
    np.testing.assert_array_equal(found.top_tokens, expected.top_tokens)
    for name in ("log_probs", "top_log_probs", "perplexity", "lengths"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-4, atol=1e-5)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), params)
    found = jax.vmap(lambda model: lsjax.score(model, TOKENS, **CHUNKS).log_probs)(stacked)
    for index, model in enumerate((params, jax.tree.map(lambda leaf: 2 * leaf, params))):
        np.testing.assert_allclose(found[index], lsjax.score(model, TOKENS, **CHUNKS).log_probs, atol=1e-4)


def test_gradients_are_those_of_all_logits_at_once(params):
    def loss(params):
        return -lsjax.score(params, TOKENS, prompt_lengths=LENGTHS, **CHUNKS).total_log_prob.mean()

    def plain(params):
        log_probs = jax.nn.log_softmax(lsjax.forward(params, TOKENS)[:, :-1])
        chosen = jnp.take_along_axis(log_probs, TOKENS[:, 1:, None], axis=-1)[..., 0]
        return -jnp.where(np.arange(1, WIDTH) < LENGTHS[:, None], chosen, 0).sum(axis=1).mean()

    found, expected = jax.jit(jax.grad(loss))(params), jax.jit(jax.grad(plain))(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), found, expected)
    assert min(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected)) > 1e-3


def test_eager_calls_of_many_lengths_compile_little(params):
    before = compiled_programs(_score)
    rng = np.random.default_rng(3)
    for length in range(17, 33):
        tokens = rng.integers(0, VOCAB, (3, length))
        found = lsjax.score(params, tokens, prompt_lengths=[length, 2, 17], num_layers=1)
        assert found.log_probs.shape == (3, length)
    assert compiled_programs(_score) == before + 2


def test_longrope_takes_the_factors_of_the_text(params):
    half = CONFIG.head_dim // 2
    scaling: Any = {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
    }
    config = dataclasses.replace(CONFIG, rope_scaling=lsjax.RopeScaling(**scaling))
    model = lsjax.Params(config, params.tree)
    for width, capacity in ((16, None), (17, None), (12, 40)):  # a bucket of 24 is no long text
        tokens = TOKENS[:, :width]
        logits = NumpyLlama(model, length=capacity or width).logits(tokens)
        found = lsjax.score(model, tokens, capacity=capacity)
        expected = of_tokens(log_softmax(logits), tokens, np.full(4, width))
        np.testing.assert_allclose(found.log_probs, expected, atol=1e-4)
    with pytest.raises(ValueError, match="take them apart, or give capacity="):
        lsjax.score(model, TOKENS, prompt_lengths=LENGTHS)


def test_rows_on_two_devices(params):
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    expected = lsjax.score(params, TOKENS, prompt_lengths=LENGTHS, top_n=3, **CHUNKS)
    everywhere = jax.device_put(params, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    found = lsjax.score(everywhere, jax.device_put(TOKENS, sharding), prompt_lengths=LENGTHS, top_n=3, **CHUNKS)
    assert found.log_probs.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(found.top_tokens, expected.top_tokens)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=1e-5)


BATCH, LONG, LARGE = 4, 1024, 20_000
LOGITS_BYTES = BATCH * LONG * LARGE * 4
BLOCK_BYTES = POSITION_CHUNK * VOCAB_CHUNK * 4


def large_model(dtype: Any, tied: bool) -> lsjax.Params:
    sizes: Any = {"vocab_size": LARGE, "hidden_size": 128, "intermediate_size": 64, "tie_word_embeddings": tied}
    config = dataclasses.replace(CONFIG, **sizes, head_dim=16, num_hidden_layers=1, max_position_embeddings=LONG)
    return lsjax.Params.abstract(config, dtype)


def abstract_texts(batch: int, width: int) -> _Texts:
    rows = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return _Texts(jax.ShapeDtypeStruct((batch, width), jnp.int32), rows, rows)


def program(params, texts: _Texts, top_n: int = 5) -> Any:
    return _score.lower(params, texts, _Sizes(1, top_n, LONG, POSITION_CHUNK, VOCAB_CHUNK)).compile()


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_no_more_than_blocks_of_logits_are_held(tied, prepared):
    params = large_model(jnp.float32, tied)
    params = jax.eval_shape(lsjax.prepare, params) if prepared else params
    assert temporaries_of(program(params, abstract_texts(BATCH, LONG))) < 3 * BLOCK_BYTES < LOGITS_BYTES / 6


def test_all_logits_are_noticed():
    """The negative control of the test above."""

    def all_at_once(params, tokens):
        log_probs = jax.nn.log_softmax(lsjax.forward(params, tokens)[:, :-1])
        return jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)

    texts = abstract_texts(BATCH, LONG)
    compiled = jax.jit(all_at_once).lower(large_model(jnp.float32, False), texts.tokens).compile()
    assert temporaries_of(compiled) > 0.9 * LOGITS_BYTES


def test_a_mapped_program_holds_the_blocks_of_one():
    params, texts = large_model(jnp.float32, False), abstract_texts(BATCH, LONG)
    mapped = jax.jit(jax.vmap(lambda params, tokens: lsjax.score(params, tokens, top_n=5), in_axes=(None, 0)))
    temporaries = temporaries_of(mapped.lower(params, texts.tokens).compile())
    assert temporaries < 1.1 * temporaries_of(program(params, texts))


HEAD_BYTES = LARGE * 128 * 4  # in float32


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_no_head_of_16_bits_is_held_in_float32(tied, prepared):
    params = large_model(jnp.bfloat16, tied)
    params = jax.eval_shape(lsjax.prepare, params) if prepared else params
    compiled = _score.lower(params, abstract_texts(2, 64), _Sizes(1, 5, 64, 32, 1024)).compile()
    assert temporaries_of(compiled) < HEAD_BYTES / 4


def test_a_head_in_float32_is_noticed():
    """The negative control of the test above: a head that is widened before a loop takes parts of it."""

    def products(x, weight):
        wide = jax.lax.optimization_barrier(weight.astype(jnp.float32))

        def one(first):
            part = jax.lax.dynamic_slice_in_dim(wide, first, 1024)
            return dot(x, part, transposed=True, dtype=jnp.float32).max(axis=1)

        return jax.lax.map(one, jnp.arange(0, LARGE - 1024, 1024))

    shapes = [jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16) for rows in (32, LARGE)]
    assert temporaries_of(jax.jit(products).lower(*shapes).compile()) >= HEAD_BYTES


def test_bfloat16_weights(models):
    for name, form in (("tied", lambda model: model), ("untied", lsjax.prepare)):
        halved = form(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), models[name]))
        expected = of_tokens(log_softmax(lsjax.forward(halved, TOKENS)))
        found = lsjax.score(halved, TOKENS, prompt_lengths=LENGTHS, **CHUNKS)
        assert found.log_probs.dtype == jnp.float32
        difference = np.abs(np.asarray(found.log_probs) - expected)
        assert difference.max() < 0.02 * expected.std()


def test_the_program_lowers_for_cuda():
    traced = _score.trace(large_model(jnp.bfloat16, False), abstract_texts(2, 64), _Sizes(1, 0, 64, 16, 4096))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.dot_general" in text
    assert "custom_call" not in text


REFUSED = [
    ({"top_n": 0}, r"top_n: expected an int in 1\.\.251, got 0"),
    ({"top_n": 252}, r"top_n: expected an int in 1\.\.251, got 252"),
    ({"top_n": 1.5}, r"top_n: expected an int in 1\.\.251, got 1\.5"),
    ({"num_layers": 5}, r"num_layers: expected a layer in 1\.\.2, got 5"),
    ({"position_chunk": 0}, "position_chunk: expected an int of at least 1, got 0"),
    ({"vocab_chunk": -1}, "vocab_chunk: expected an int of at least 1, got -1"),
    ({"capacity": 20}, "capacity: expected at least 21 tokens"),
    ({"prompt_lengths": [21, 1, 2, 3]}, r"expected 2\.\.21 tokens a row, got 1 in row 1"),
    ({"prompt_lengths": [21, 22, 2, 3]}, r"expected 2\.\.21 tokens a row, got 22 in row 1"),
    ({"prompt_lengths": LENGTHS, "attention_mask": TOKENS >= 0}, "prompt_lengths or attention_mask, not both"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_refused(params, options, message):
    with pytest.raises(ValueError, match=message):
        lsjax.score(params, TOKENS, **options)


def test_a_text_of_one_token_is_refused(params):
    for tokens in ([5], [[5], [6]]):
        with pytest.raises(ValueError, match="tokens: expected at least 2 tokens a row, got 1"):
            lsjax.score(params, tokens)


def test_a_layer_runs_once_and_those_past_the_exit_never(params):
    """Whatever the blocks, and on one position less than the text has."""
    runs = collections.Counter()

    def count(next_method, args, kwargs, context):
        if (context.module.name or "").startswith("layers_") and context.method_name == "__call__":
            jax.debug.callback(lambda name=context.module.name, n=args[0].shape[1]: runs.update([(name, n)]))
        return next_method(*args, **kwargs)

    with nn.intercept_methods(count):
        jax.jit(lambda tokens: lsjax.score(params, tokens, num_layers=1, **CHUNKS))(TOKENS)
        jax.effects_barrier()
    assert runs == {("layers_0", WIDTH - 1): 1}
