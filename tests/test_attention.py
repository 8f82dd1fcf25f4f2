"""Attention in blocks: right at every boundary, and its cost follows the used length."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import CONFIG
from support import NumpyLlama, random_params

import lsjax
from lsjax.model import attention
from lsjax.model.cache import LayerCache, init_cache, read, write
from lsjax.model.llama import Llama


def plain(query, key, value, positions, same=True):
    """Softmax attention in float64, all keys at once; ``same`` further restricts what each query sees."""
    group = query.shape[2] // key.shape[1]
    key, value = (np.repeat(np.asarray(x, np.float64), group, axis=1) for x in (key, value))
    scores = np.einsum("bqhd,bhkd->bhqk", np.asarray(query, np.float64), key) / np.sqrt(query.shape[-1])
    visible = (np.arange(key.shape[2]) <= positions[:, None, :, None]) & same
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhqk,bhkd->bqhd", weights, value).reshape(*query.shape[:2], -1)


@pytest.mark.parametrize("length", [1, 63, 130, 256, 300, 2500])
def test_attention_within_documents_equals_the_definition(length):
    """One span and eight, spans in one block and in several, and lengths that none of them divide."""
    rng = np.random.default_rng(length)
    rows, positions = (3, np.tile(np.arange(length), (3, 1))) if length < 1000 else (1, np.arange(length)[None])
    query = rng.normal(size=(rows, length, 4, 8)).astype(np.float32)
    key, value = rng.normal(size=(2, rows, 2, length, 8)).astype(np.float32)
    documents = np.sort(rng.integers(0, 4, (rows, length)), axis=1).astype(np.int32)
    same = documents[:, None, :, None] == documents[:, None, None, :]
    expected = plain(query, key, value, positions, same)
    np.testing.assert_allclose(jax.jit(attention.attend_documents)(query, key, value, documents), expected, atol=2e-5)


@pytest.mark.parametrize("length", [70, 300, 2100])
def test_attention_within_documents_has_the_gradient_of_the_definition(length):
    """Against a plain softmax that JAX differentiates, under long rows' rematerialisation too."""
    rng = np.random.default_rng(length)
    query = rng.normal(size=(1, length, 2, 4)).astype(np.float32)
    key, value = rng.normal(size=(2, 1, 1, length, 4)).astype(np.float32)
    documents = jnp.asarray(np.sort(rng.integers(0, 3, (1, length)), axis=1), jnp.int32)
    direction = rng.normal(size=(1, length, 8)).astype(np.float32)

    def simple(query, key, value):
        scores = jnp.einsum("bqhd,bkd->bhqk", query, key[:, 0]) / 2
        visible = jnp.tri(length, dtype=bool) & (documents[:, :, None] == documents[:, None, :])
        weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf))
        return jnp.einsum("bhqk,bkd->bqhd", weights, value[:, 0]).reshape(1, length, 8)

    def ours(query, key, value):
        return attention.attend_documents(query, key, value, documents)

    expected, found = (
        jax.jit(jax.grad(lambda *args, mix=mix: jnp.vdot(mix(*args), direction), argnums=(0, 1, 2)))(query, key, value)
        for mix in (simple, ours)
    )
    for plain_grad, grad in zip(expected, found, strict=True):
        np.testing.assert_allclose(grad, plain_grad, atol=1e-4)


@pytest.mark.parametrize("slots", [7, 256, 300, 513])
def test_attention_equals_the_definition(slots):
    """Few and many queries, starts that differ by row, capacities that blocks do not divide, garbage past the end."""
    rng = np.random.default_rng(slots)
    for length in {1, 5, slots}:
        starts = rng.integers(0, slots - length + 1, 3) if length < slots else np.zeros(3, int)
        positions = starts[:, None] + np.arange(length)
        query = rng.normal(size=(3, length, 4, 8)).astype(np.float32)
        key, value = rng.normal(size=(2, 3, 2, slots, 8)).astype(np.float32)
        unused = np.arange(slots) > positions.max(axis=1)[:, None]
        key[np.broadcast_to(unused[:, None], key.shape[:3])] = 1e4
        found = attention.attend(
            jnp.asarray(query), LayerCache(key, value, key.dtype), jnp.asarray(positions), jnp.max(positions) + 1
        )
        np.testing.assert_allclose(found, plain(query, key, value, positions), rtol=1e-5, atol=1e-5)


def blocks_read(monkeypatch, slots: int, length: int, start: int) -> int:
    """Blocks of keys that one call reads, counted at run time."""
    counts = collections.Counter()
    product = attention._batched_dot

    def counted(*args, **kwargs):
        jax.debug.callback(lambda: counts.update(["products"]))
        return product(*args, **kwargs)

    monkeypatch.setattr(attention, "_batched_dot", counted)
    positions = start + jnp.arange(length)[None]
    key = jnp.ones((1, 2, slots, 8))
    cache, used = LayerCache(key, key, key.dtype), jnp.max(positions) + 1
    jax.block_until_ready(attention.attend(jnp.ones((1, length, 4, 8)), cache, positions, used))
    jax.effects_barrier()
    monkeypatch.undo()
    assert counts["products"] % 2 == 0  # scores and mixture
    return counts["products"] // 2


def test_the_cost_follows_the_used_length(monkeypatch):
    for slots in (512, 8192):
        assert blocks_read(monkeypatch, slots, 1, 9) == 1
        assert blocks_read(monkeypatch, slots, 1, 255) == 1
        assert blocks_read(monkeypatch, slots, 5, 254) == 2
    assert blocks_read(monkeypatch, 8192, 1, 2000) == 8
    # A long prompt: its first 256 queries read one block, the next two, the last three.
    assert blocks_read(monkeypatch, 8192, 700, 0) == 1 + 2 + 3


def test_blocks_fit_the_cache_of_a_core_and_are_never_all_slots():
    assert attention.block_size(batch=1, kv_heads=3, slots=129, head_dim=64, length=1) == 128
    assert attention.block_size(batch=1, kv_heads=3, slots=128, head_dim=64, length=5) == 64
    assert attention.block_size(batch=1, kv_heads=8, slots=8192, head_dim=64, length=1) == 256
    assert attention.block_size(batch=4, kv_heads=3, slots=1024, head_dim=64, length=1) == 128
    assert attention.block_size(batch=16, kv_heads=3, slots=1024, head_dim=64, length=1) == 32
    assert attention.block_size(batch=1, kv_heads=3, slots=20, head_dim=64, length=1) == 20  # too few to split
    assert attention.block_size(batch=16, kv_heads=3, slots=1024, head_dim=64, length=200) == 256


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_cache_of_16_bits_keeps_its_numbers(dtype):
    rng = np.random.default_rng(0)
    (cache,) = init_cache(CONFIG, 2, 9, 1, dtype)
    shape = (2, CONFIG.num_key_value_heads, 3, CONFIG.head_dim)
    key, value = jnp.asarray(rng.normal(size=(2, *shape)), jnp.float32)
    for where in (jnp.array([1, 6]), jnp.array([[1, 2, 3], [6, 7, 8]])):
        written = jax.jit(write)(cache, key, value, where)
        for held, new in ((written.key, key), (written.value, value)):
            for row, first in enumerate((1, 6)):
                found = read(held, first, 3, cache.dtype)[row].astype(jnp.float32)
                np.testing.assert_array_equal(found, new.astype(dtype)[row].astype(jnp.float32))


@pytest.mark.parametrize("width", [250, 256, 257])
def test_decoding_across_a_block_boundary(width):
    params = random_params(CONFIG, seed=3, deep_from=1, deep_scale=0.1)
    prompt = np.random.default_rng(width).integers(0, CONFIG.vocab_size, (1, width))
    expected, margins = NumpyLlama(params).generate(prompt, np.array([width]), 12)
    assert margins.min() > 1e-4
    options = {"max_new_tokens": 12, "eos_token_id": (), "capacity": 600}
    for program in ({}, {"exit_layer": 2, "num_speculations": 3}):
        with pytest.warns(UserWarning, match="max_position_embeddings=256"):
            out = lsjax.generate(params, prompt, **program, **options)
        np.testing.assert_array_equal(out.tokens, expected)


def test_norms_in_float32_beside_bfloat16_weights_do_not_widen_the_stream():
    params = random_params(CONFIG, seed=0)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16) if leaf.ndim == 2 else leaf, params)
    assert low.tree["norm"]["scale"].dtype == jnp.float32
    model, tokens = Llama(CONFIG), jnp.arange(6)[None]
    cache = init_cache(CONFIG, 1, 8, 4, jnp.bfloat16)
    variables = {"params": low.tree}
    hidden: jax.Array = model.apply(variables, tokens, method="embed")  # pyright: ignore[reportAssignmentType]
    assert hidden.dtype == jnp.bfloat16
    for layer in range(4):
        hidden, _ = model.apply(variables, hidden, cache[:1], 0, lo=layer, hi=layer + 1, method="run_layers")
        assert hidden.dtype == jnp.bfloat16
    options = {"max_new_tokens": 20, "eos_token_id": ()}
    plainly = lsjax.generate(low, tokens, **options)
    drafted = lsjax.generate(low, tokens, exit_layer=2, **options)
    np.testing.assert_array_equal(plainly.tokens, drafted.tokens)
