"""The model against torch and transformers, module by module and then whole; and against NumPy in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze
from support import LLAMA3_ROPE, NumpyLlama, frequencies, random_params, transformers_config, transformers_model

import lsjax
from lsjax.measure.parity import compare_logits
from lsjax.measure.reference import Reference
from lsjax.model.llama import Llama
from lsjax.model.rope import inverse_frequencies, rotate, rotation
from lsjax.params import abstract_tree, flatten

CONFIG = lsjax.LlamaConfig(
    vocab_size=199,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-3,
    attention_bias=True,
    mlp_bias=True,
    rope_scaling=LLAMA3_ROPE,
)
ROPES: Any = {
    "default": {"rope_type": "default", "rope_theta": 1000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "llama3": LLAMA3_ROPE,
}
TOKENS = np.random.default_rng(1).integers(0, CONFIG.vocab_size, (2, 96))
COMPARED: Any = {"tokens": TOKENS, "depths": (1, 2, 3), "max_new_tokens": 0, "module_tolerance": 5e-6}


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, seed=0)


@pytest.fixture(scope="module")
def torch_model(params):
    pytest.importorskip("torch")
    return transformers_model(params)


def relative_error(found, expected) -> float:
    return float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))


@pytest.fixture(scope="module")
def report(params, torch_model):
    return lsjax.measure.parity(params, torch_model, **COMPARED)


@pytest.mark.parametrize("rope", ROPES)
def test_rope_equals_transformers_also_past_the_original_length(rope):
    torch = pytest.importorskip("torch")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    config = dataclasses.replace(CONFIG, rope_theta=10000.0, rope_scaling=ROPES[rope])
    positions = np.array([[0, 1, 2, 63, 64, 65, 200, 511, 700, 2000]])
    x = np.random.default_rng(0).normal(size=(1, positions.shape[1], 8, config.head_dim)).astype(np.float32)
    found = rotate(jnp.asarray(x), *rotation(config, jnp.asarray(positions)))
    embedding = LlamaRotaryEmbedding(transformers_config(config))
    heads_first = torch.tensor(x).swapaxes(1, 2)
    expected, _ = apply_rotary_pos_emb(heads_first, heads_first, *embedding(heads_first, torch.tensor(positions)))
    assert relative_error(found, expected.swapaxes(1, 2).numpy()) < 1e-5


@pytest.mark.parametrize("rope", ROPES)
def test_rope_frequencies_equal_their_definition_in_float64(rope):
    config = dataclasses.replace(CONFIG, rope_theta=10000.0, rope_scaling=ROPES[rope])
    np.testing.assert_allclose(inverse_frequencies(config), frequencies(config), rtol=5e-7)
    assert inverse_frequencies(config).dtype == np.float32


def test_rope_angles_are_float32_whatever_the_weights():
    cos, sin = rotation(CONFIG, jnp.arange(300))
    assert cos.dtype == sin.dtype == jnp.float32
    rotated = rotate(jnp.ones((300, 1, CONFIG.head_dim), jnp.bfloat16), cos, sin)
    assert rotated.dtype == jnp.bfloat16
    half = CONFIG.head_dim // 2
    np.testing.assert_array_equal(rotated[:, 0, :half], (cos - sin).astype(jnp.bfloat16))


def test_norm_equals_transformers(params, torch_model):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(2).normal(size=(4, 64)).astype(np.float32) * np.array([[1], [1e-3], [30], [0.1]])
    x = x.astype(np.float32)
    with torch.no_grad():
        expected = torch_model.model.norm(torch.tensor(x)).numpy()
    import flax.linen as nn

    norm = nn.RMSNorm(epsilon=CONFIG.rms_norm_eps)
    assert relative_error(norm.apply({"params": params.tree["norm"]}, x), expected) < 1e-5


def test_every_module_and_the_logits_at_every_depth_equal_transformers(params, report):
    report.assert_close()
    assert len(report.rows) == 17 + 3
    assert lsjax.forward(params, TOKENS).dtype == jnp.float32
    for depth, logits in zip((1, 2, 3), lsjax.forward(params, TOKENS, exits=(1, 2, 3)), strict=True):
        assert logits.std() >= 1
        assert report[f"logits, {depth} of 3 layers"].error < 1e-4


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("tied", "biases"), [(True, False), (False, True)])
def test_logits_equal_transformers_for_each_kind_of_model(rope, tied, biases):
    pytest.importorskip("torch")
    config = dataclasses.replace(
        CONFIG,
        rope_theta=10000.0,
        rope_scaling=ROPES[rope],
        tie_word_embeddings=tied,
        attention_bias=biases,
        mlp_bias=biases,
        head_dim=24,
    )
    model = random_params(config, seed=4)
    (row,) = compare_logits(model, Reference(transformers_model(model)), TOKENS, TOKENS >= 0, (3,), 1e-4)
    assert row.ok
    assert row.error < 1e-4
    assert lsjax.forward(model, TOKENS, exits=(3,))[0].std() >= 1


def swapped_heads(params):
    """Query and key channels interleaved, as some converters leave them."""
    tree = jax.tree.map(lambda leaf: leaf, params.tree)
    order = np.arange(CONFIG.head_dim).reshape(2, -1).T.ravel()
    for name, heads in (("q_proj", 8), ("k_proj", 2)):
        kernel = tree["layers_0"]["self_attn"][name]["kernel"]
        tree["layers_0"]["self_attn"][name]["kernel"] = kernel.reshape(64, heads, -1)[:, :, order].reshape(64, -1)
    return lsjax.Params(CONFIG, tree)


def regrouped(params):
    """Query heads in the order of another grouping (head h reads key head h % 2 instead of h // 4)."""
    tree = jax.tree.map(lambda leaf: leaf, params.tree)
    kernel = tree["layers_0"]["self_attn"]["q_proj"]["kernel"].reshape(64, 2, 4, -1)
    tree["layers_0"]["self_attn"]["q_proj"]["kernel"] = kernel.swapaxes(1, 2).reshape(64, -1)
    return lsjax.Params(CONFIG, tree)


def one_weight(params):
    """A single number of the last layer's MLP, a twentieth of a deviation off."""
    tree = jax.tree.map(lambda leaf: leaf, params.tree)
    kernel = tree["layers_2"]["mlp"]["down_proj"]["kernel"]
    tree["layers_2"]["mlp"]["down_proj"]["kernel"] = kernel.at[5, 7].add(0.05 * kernel.std())
    return lsjax.Params(CONFIG, tree)


# Each fault, and the modules that are wrong for it, what is given to them being right.
FAULTS: Any = {
    "theta": (
        lambda params: lsjax.Params(
            dataclasses.replace(CONFIG, rope_scaling={**LLAMA3_ROPE, "rope_theta": 1010.0}, rope_theta=10000.0),
            params.tree,
        ),
        ["rotary cos", "rotary sin"],
    ),
    "epsilon": (
        lambda params: lsjax.Params(dataclasses.replace(CONFIG, rms_norm_eps=2e-3), params.tree),
        ["input_layernorm", "post_attention_layernorm", "whole layer", "norm"],
    ),
    "grouping": (regrouped, ["self_attn.q_proj", "self_attn", "whole layer"]),
    "q and k order": (swapped_heads, ["self_attn.q_proj", "self_attn.k_proj", "self_attn", "whole layer"]),
    "one weight": (one_weight, ["mlp.down_proj", "mlp", "whole layer"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parity_notices_a_deliberate_fault_and_names_the_modules(params, fault):
    pytest.importorskip("torch")
    spoil, modules = FAULTS[fault]
    report = lsjax.measure.parity(
        params, transformers_model(spoil(params)), **COMPARED
    )  # theirs, so ours stay compiled
    failed = [row.what for row in report.failures]
    assert [what for what in failed if not what.startswith("logits")] == modules
    assert report["logits, 3 of 3 layers"].error > (1e-3 if fault != "one weight" else 1e-4)
    assert "logits, 3 of 3 layers" in failed
    layer = {"grouping": "layers.0", "q and k order": "layers.0", "one weight": "layers.2"}.get(fault)
    assert layer in (None, report.failures[0].where)
    with pytest.raises(AssertionError, match=f"first of all {modules[0]}"):
        report.assert_close()


def test_logits_equal_numpy_float64(params):
    oracle = NumpyLlama(params)
    for found, depth in zip(lsjax.forward(params, TOKENS, exits=(3, 1)), (3, 1), strict=True):
        assert np.abs(found - oracle.logits(TOKENS, depth)).max() < 1e-4


def test_several_exits_equal_one_at_a_time_and_run_each_layer_once(params):
    exits = (2, 3, 2)
    together = lsjax.forward(params, TOKENS, exits=exits)
    assert len(together) == 3
    for found, depth in zip(together, exits, strict=True):
        np.testing.assert_allclose(found, lsjax.forward(params, TOKENS, num_layers=depth), atol=1e-5)
    products = str(jax.make_jaxpr(lambda p: lsjax.forward(p, TOKENS, exits=exits))(params)).count("dot_general")
    layer = 7 + 2  # projections, scores and mixture
    assert products == 3 * layer + 2  # and one head for each different exit


def test_one_row_and_padding_on_the_right(params):
    whole = lsjax.forward(params, TOKENS[0, :50])
    assert whole.shape == (50, CONFIG.vocab_size)
    np.testing.assert_allclose(whole, lsjax.forward(params, TOKENS)[0, :50], atol=1e-4)


def test_long_prompts_take_queries_in_blocks(params):
    tokens = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (2, 700))
    assert np.abs(lsjax.forward(params, tokens) - NumpyLlama(params).logits(tokens)).max() < 2e-4


def test_forward_is_differentiable_also_in_blocks(params):
    tokens = np.random.default_rng(6).integers(0, CONFIG.vocab_size, (1, 300))

    def loss(params):
        return jnp.mean(jax.nn.logsumexp(lsjax.forward(params, tokens), axis=-1))

    gradient = jax.grad(loss)(params)
    assert isinstance(gradient, lsjax.Params)
    # The slope along one direction, from float64 differences.
    rng = np.random.default_rng(7)
    direction = {path: rng.normal(size=leaf.shape) for path, leaf in flatten(params.tree).items()}
    slope = sum(np.sum(np.asarray(leaf, np.float64) * direction[p]) for p, leaf in flatten(gradient.tree).items())

    def moved(step):
        oracle = NumpyLlama(params)
        oracle.weights = {path: leaf + step * direction[path] for path, leaf in oracle.weights.items()}
        logits = oracle.logits(tokens)
        top = logits.max(-1)
        return np.mean(top + np.log(np.exp(logits - top[..., None]).sum(-1)))

    np.testing.assert_allclose(slope, (moved(1e-5) - moved(-1e-5)) / 2e-5, rtol=1e-3)


def test_bfloat16_weights_give_float32_logits_near_the_float32_ones(params):
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), low)
    assert low.dtype == jnp.bfloat16
    found, expected = lsjax.forward(low, TOKENS), lsjax.forward(rounded, TOKENS)
    assert found.dtype == jnp.float32
    assert np.corrcoef(np.ravel(found), np.ravel(expected))[0, 1] > 0.999


def test_the_plain_module_reads_the_same_tree(params):
    found: Any = Llama(CONFIG).apply({"params": params.tree}, jnp.asarray(TOKENS))
    np.testing.assert_allclose(found[0], lsjax.forward(params, TOKENS), atol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True)])
def test_shapes_are_those_that_the_module_makes(tied, biases):
    config = lsjax.LlamaConfig(
        vocab_size=30,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        attention_bias=biases[0],
        mlp_bias=biases[1],
    )
    tokens = jnp.zeros((1, 1), jnp.int32)
    made: Any = jax.eval_shape(lambda key: Llama(config, jnp.dtype(jnp.float16)).init(key, tokens), jax.random.key(0))
    assert abstract_tree(config, "float16") == made["params"]


def test_init_follows_the_configuration_and_the_key():
    first, second = lsjax.init(CONFIG, jax.random.key(0)), lsjax.init(CONFIG, jax.random.key(1))
    leaves = flatten(first.tree)
    assert float(jnp.std(leaves["embed_tokens/embedding"])) == pytest.approx(0.02, rel=0.05)
    assert (leaves["norm/scale"] == 1).all()
    assert (leaves["layers_0/self_attn/q_proj/bias"] == 0).all()
    kernels = [path for path in leaves if path.endswith("kernel")]
    assert all((leaves[path] != flatten(second.tree)[path]).any() for path in kernels)
    assert len({float(leaves[path].ravel()[0]) for path in kernels}) == len(kernels)
    again = lsjax.init(CONFIG, jax.random.key(0), dtype="bfloat16")
    assert again.dtype == jnp.bfloat16


REAL_CONFIGS = {
    "Llama-2-7B": ({}, 6_738_415_616),
    "Llama-3.2-1B": (
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
        1_235_814_400,
    ),
    "Llama-3-8B": ({"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}, 8_030_261_248),
    "Llama-2-70B": (
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
        },
        68_976_648_192,
    ),
}


@pytest.mark.parametrize("name", REAL_CONFIGS)
def test_generate_has_the_right_shapes_on_real_configurations(name):
    fields, count = REAL_CONFIGS[name]
    real = lsjax.Params.abstract(lsjax.LlamaConfig(**fields), jnp.bfloat16)
    assert real.num_parameters == count
    assert real.num_bytes == 2 * count
    tokens = jax.ShapeDtypeStruct((2, 24), jnp.int32)
    out = jax.eval_shape(lambda p, t: lsjax.generate(p, t, exit_layer=4, num_speculations=6), real, tokens)
    assert out.tokens.shape == (2, 24 + 128)
    assert out.tokens.dtype == jnp.int32
    assert out.stats.accept_histogram.shape == (2, 7)


def test_params_refuse_a_tree_that_does_not_fit(params):
    tree = jax.tree.map(lambda leaf: leaf, params.tree)
    del tree["norm"]
    tree["layers_0"]["mlp"]["up_proj"]["kernel"] = jnp.zeros((64, 3))
    tree["layers_1"]["mlp"]["extra"] = jnp.zeros(2)
    tree["layers_2"]["input_layernorm"]["scale"] = jnp.zeros(64, jnp.int32)
    tree["layers_2"]["post_attention_layernorm"]["scale"] = jnp.zeros(64, jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match="do not fit") as error:
        lsjax.Params(CONFIG, tree)
    lines = str(error.value).splitlines()
    assert len(lines) == 6
    assert any("layers_2/post_attention_layernorm/scale: expected" in line and "float8" in line for line in lines)
    assert any("missing: norm/scale (64,)" in line for line in lines)
    assert any("layers_0/mlp/up_proj/kernel: expected the shape (64, 112), got (64, 3)" in line for line in lines)
    assert any("unexpected: layers_1/mlp/extra" in line for line in lines)
    assert any(
        "layers_2/input_layernorm/scale: expected floating-point numbers of at least 16 bits, got int32" in line
        for line in lines
    )


def test_params_take_any_mapping_and_keep_plain_dictionaries(params):
    frozen = lsjax.Params(CONFIG, freeze(params.tree))
    assert jax.tree.structure(frozen) == jax.tree.structure(params)
    frozen.tree["norm"]["scale"] = None
    assert params.tree["norm"]["scale"] is not None


def test_params_are_one_pytree_whose_configuration_is_static(params):
    leaves, structure = jax.tree.flatten(params)
    assert len(leaves) == len(flatten(params.tree))
    assert hash(params.config) == hash(dataclasses.replace(params.config))
    doubled = jax.tree.map(lambda leaf: leaf * 2, params)
    assert doubled.config is params.config
    assert jax.tree.structure(doubled) == structure
