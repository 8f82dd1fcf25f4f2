"""Prepared weights: the same model in the form that decoding reads fastest."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import CONFIG
from support import random_params, temporaries_of

import lsjax
from lsjax.model import projection
from lsjax.model.projection import dot, lookup

TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12) % CONFIG.vocab_size


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("cpu", [True, False])
def test_prepared_weights_are_the_same_model(tied, cpu, monkeypatch):
    """Both forms, CPUs' and others', with biases, against the plain one."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied, attention_bias=True, mlp_bias=True)
    params = random_params(config, 5)
    monkeypatch.setattr("lsjax.prepared._platform", lambda _: "cpu" if cpu else "gpu")
    prepared = lsjax.prepare(params)
    assert prepared.module.transposed == cpu
    assert lsjax.prepare(prepared) is prepared
    assert prepared.num_bytes == params.num_bytes  # nothing is held twice
    logits, expected = lsjax.forward(prepared, TOKENS), lsjax.forward(params, TOKENS)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
    options = {"exit_layer": 2, "max_new_tokens": 12, "eos_token_id": ()}
    out, plain = (lsjax.generate(model, TOKENS, **options) for model in (prepared, params))
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    np.testing.assert_array_equal(out.stats.accept_histogram, plain.stats.accept_histogram)


def test_donated_weights_are_deleted_and_shared_ones_are_not():
    params = random_params(CONFIG, 5)
    expected = lsjax.forward(params, TOKENS)
    given = params.tree
    prepared = lsjax.prepare(params, donate=True)
    assert given["layers_0"]["mlp"]["up_proj"]["kernel"].is_deleted()
    assert given["layers_3"]["self_attn"]["o_proj"]["kernel"].is_deleted()
    assert not given["embed_tokens"]["embedding"].is_deleted()
    np.testing.assert_allclose(lsjax.forward(prepared, TOKENS), expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


def test_weights_are_prepared_inside_a_caller_s_jit():
    params = random_params(CONFIG, 5)
    run = jax.jit(lambda params, tokens: lsjax.forward(lsjax.prepare(params), tokens))
    expected = lsjax.forward(params, TOKENS)
    np.testing.assert_allclose(run(params, TOKENS), expected, rtol=1e-4, atol=1e-4 * float(expected.std()))
    with pytest.raises(ValueError, match=r"donate: expected False inside jit"):
        jax.jit(lambda params: lsjax.prepare(params, donate=True))(params)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("transposed", [True, False])
def test_16_bit_products_accumulate_in_float32(rows, transposed):
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 1, 64)), jnp.bfloat16)
    weight = jnp.asarray(rng.normal(size=(3, 8, 64)), jnp.bfloat16)
    expected = np.einsum("blx,fgx->blfg", np.asarray(x, np.float64), np.asarray(weight, np.float64))
    held = weight if transposed else jnp.moveaxis(weight, -1, 0)
    wide = dot(x, held, transposed=transposed, dtype=jnp.float32)
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, expected, rtol=1e-5, atol=1e-5)
    narrow = dot(x, held, transposed=transposed)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("width", [64, 1024])
def test_products_of_any_number_of_rows(dtype, width):
    rng = np.random.default_rng(width)
    weight = jnp.asarray(rng.normal(size=(24, width)), dtype)
    for count in (1, 2, 4, 5, 9, 16, 17, 33):
        x = jnp.asarray(rng.normal(size=(count, width)), dtype)
        expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
        found = jax.jit(lambda x: dot(x, weight, transposed=True, dtype=jnp.float32))(x)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4, err_msg=f"{count} rows")


def test_few_rows_are_the_second_operand_of_a_wide_product():
    """XLA would swap the operands back, and then arranges all of the weight anew at each product."""

    def program(rows: int, width: int) -> str:
        def product(x, weight):
            return jax.nn.silu(dot(x, weight, transposed=True))

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, width), (640, width))]
        return str(jax.jit(product).lower(*shapes).compile().as_text())

    for rows, filled in ((2, 2), (4, 4), (5, 8), (11, 16), (20, 20)):
        assert re.search(rf"f32\[640,{filled}\]\S* dot\(", program(rows, 1024)), rows
    for rows, width in ((5, 64), (1, 1024), (100, 1024)):
        assert re.search(rf"f32\[(?:{rows},)?640\]\S* dot\(", program(rows, width)), (rows, width)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_of_a_table_and_their_gradient(dtype):
    table = jax.random.normal(jax.random.key(0), (7, 3)).astype(dtype)
    for rows in ([[2, 6], [9, -1]], [[-3, -1], [-2, -9]]):
        found, nearest = lookup(table, jnp.asarray(rows)), np.clip(rows, 0, 6)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, np.asarray(table)[nearest])
        counts = jax.grad(lambda table, rows=rows: lookup(table, jnp.asarray(rows)).astype(jnp.float32).sum())(table)
        expected = np.bincount(nearest.reshape(-1), minlength=7)
        np.testing.assert_array_equal(counts.astype(jnp.float32), np.repeat(expected[:, None], 3, axis=1))


@pytest.mark.parametrize("form", ["plain", "prepared"])
def test_bfloat16_weights_and_caches_are_held_once(form, monkeypatch):
    """No float32 copy of a weight, or of a cache, among a loop's temporaries."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=2, hidden_size=256, intermediate_size=1024, vocab_size=2048)
    params = lsjax.init(config, jax.random.key(0), jnp.bfloat16)
    model = lsjax.prepare(params) if form == "prepared" else params

    def temporaries(batch: int) -> int:
        def run(model, tokens):
            options = {"exit_layer": 1, "max_new_tokens": 4, "eos_token_id": (), "capacity": 1024}
            return lsjax.generate(model, tokens, **options).tokens

        return temporaries_of(jax.jit(run).lower(model, jnp.zeros((batch, 4), jnp.int32)).compile())

    # generate's own caches, 16 bits each, are temporaries of this program; a copy would be twice as large again.
    cache = 2 * 2 * config.num_key_value_heads * 1029 * config.head_dim * 2
    assert temporaries(1) < cache + 0.2 * model.num_bytes
    monkeypatch.setattr(projection, "on_cpu", lambda: False)
    jax.clear_caches()
    assert temporaries(1) > model.num_bytes
    jax.clear_caches()


def test_prepared_weights_are_not_a_checkpoint(tmp_path):
    with pytest.raises((TypeError, ValueError), match="Params"):
        lsjax.save(lsjax.prepare(random_params(CONFIG, 5)), tmp_path / "model")  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "model").exists()
