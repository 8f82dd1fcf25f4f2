"""Params and batches on two devices, data- and tensor-parallel: the tokens of one, the cache never gathered."""

import collections
import functools
import re
from typing import Any

import flax.struct
import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from oracle import CONFIG, case

import lsjax
from lsjax import processors
from lsjax.decode.generate import _generate
from lsjax.decode.request import Request
from lsjax.decode.state import Plan
from lsjax.model import attention

pytestmark = pytest.mark.usefixtures("fewer_optimizations")

SPECULATIVE, AUTOREGRESSIVE = Plan(2, 4, 3), Plan(4, 4, 0)
LAYOUTS = ("data", "tensor")


@pytest.fixture(scope="module")
def data():
    return case(seed=0, deep_scale=0.3)


@pytest.fixture(scope="module")
def mesh():
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices (XLA_FLAGS=--xla_force_host_platform_device_count=2)")
    return Mesh(np.array(jax.devices()[:2]), ("parts",))


def place(data, mesh, layout: str):
    """Params and prompts on the mesh."""
    if layout == "tensor":
        return jax.device_put(data.params, lsjax.tensor_parallel(CONFIG, mesh, "parts")), data.prompts
    rows = NamedSharding(mesh, PartitionSpec("parts"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.device_put(data.params, everywhere), jax.device_put(data.prompts, rows)


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@functools.cache
def on_one_device(exit_layer: int | None):
    data = case(seed=0, deep_scale=0.3)
    return generate(data.params, data.prompts, data.lengths, exit_layer)


def generate(params, prompts, lengths, exit_layer: int | None):
    data = case(seed=0, deep_scale=0.3)
    eos = tuple(np.unique(data.texts[np.arange(16), data.lengths + 9]).tolist())
    options = {"exit_layer": exit_layer, "num_speculations": 3, "max_new_tokens": 24, "eos_token_id": eos}
    return lsjax.generate(params, prompts, prompt_lengths=lengths, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_one_device(data, mesh, layout):
    params, prompts = place(data, mesh, layout)
    found = generate(params, prompts, data.lengths, 2)
    assert_same(found, on_one_device(2))
    if layout == "data":
        assert found.tokens.sharding.is_equivalent_to(prompts.sharding, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prepared_weights_follow_and_write_the_same(data, mesh, layout):
    params, prompts = place(data, mesh, layout)
    prepared = lsjax.prepare(params)
    weight = prepared.tree["layers_0"]["mlp"]["gate_up_proj"]["weight"]
    local = (2, CONFIG.intermediate_size // (2 if layout == "tensor" else 1), CONFIG.hidden_size)
    assert weight.sharding.shard_shape(weight.shape) == local
    found = generate(prepared, prompts, data.lengths, 2)
    np.testing.assert_array_equal(found.tokens, on_one_device(2).tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "exit_layer"), [("data", 2), ("tensor", None)])
def test_tokens_are_those_of_one_device_in_the_caller_s_jit(data, mesh, layout, exit_layer):
    params, prompts = place(data, mesh, layout)
    within = jax.jit(generate, static_argnums=3)
    assert_same(within(params, prompts, data.lengths, exit_layer), on_one_device(exit_layer))


def test_all_options_at_once_write_on_two_devices_what_they_write_on_one(data, mesh):
    """Keys, processors, stop sequences and the rest are split with the rows."""
    bias = np.random.default_rng(0).normal(size=CONFIG.vocab_size).astype(np.float32)

    class Bias(flax.struct.PyTreeNode):
        values: Any

        def __call__(self, logits, tokens, lengths):
            return logits + self.values

    options = {
        "exit_layer": 2,
        "num_speculations": 3,
        "max_new_tokens": 24,
        "eos_token_id": (),
        "key": jax.random.key(0),
        "temperature": np.linspace(0, 1, 16),
        "top_k": 50,
        "processors": [processors.FrequencyPenalty(0.3), processors.NoRepeatNgram(2), Bias(bias)],
        "stop_sequences": data.texts[np.arange(16), data.lengths + 9][:, None, None],
        "confidence_threshold": 0.3,
        "num_speculations_schedule": "heuristic",
        "top_n": 2,
    }
    expected = lsjax.generate(data.params, data.prompts, prompt_lengths=data.lengths, **options)
    params, prompts = place(data, mesh, "data")
    found = lsjax.generate(params, prompts, prompt_lengths=data.lengths, **options)
    assert_same((found.tokens, found.lengths, found.stats), (expected.tokens, expected.lengths, expected.stats))
    # Processed by temperatures near 0, which magnify rounding.
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-3), found.scores, expected.scores)
    assert found.scores is not None
    assert found.scores.log_probs.sharding.is_equivalent_to(prompts.sharding, 2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor"])
def test_states_stay_where_they_are(data, mesh, layout):
    params, prompts = place(data, mesh, layout)
    options = {"exit_layer": 2, "num_speculations": 3, "max_new_tokens": 24, "eos_token_id": ()}
    state = lsjax.prefill(params, prompts, prompt_lengths=data.lengths, **options)
    cache = state.cache[0].key
    local = list(cache.shape)
    local[0 if layout == "data" else 1] //= 2
    for _ in range(3):
        assert list(state.cache[3].value.sharding.shard_shape(cache.shape)) == local
        state = lsjax.decode_round(params, state)
    expected = lsjax.prefill(data.params, data.prompts, prompt_lengths=data.lengths, **options)
    for _ in range(3):
        expected = lsjax.decode_round(data.params, expected)
    assert_same((state.tokens, state.lengths, state.stats), (expected.tokens, expected.lengths, expected.stats))
    more = lsjax.prefill(params, data.prompts[:, :5], state=state)
    assert list(more.cache[0].key.sharding.shard_shape(cache.shape)) == local
    assert_same(more.tokens, lsjax.prefill(data.params, data.prompts[:, :5], state=expected).tokens)


def compiled_text(data, mesh, layout: str, plan: Plan, capacity: int) -> str:
    params, prompts = place(data, mesh, layout)
    lengths, eos = np.full(16, 12, np.int32), np.full((16, 4), -1, np.int32)
    request = Request(np.asarray(prompts, np.int32), lengths, lengths + 8, eos, np.zeros(16, np.int32))
    compiled = _generate.lower(params, request.place_like(prompts), plan, capacity).compile()
    return str(compiled.as_text())


def collectives(text: str) -> list[tuple[str, str]]:
    """Kind and shape of everything that goes from device to device."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    return [(kind, shape) for shape, kind in re.findall(rf"= \(?(\w+\[[\d,]*\]).*? ({kinds})(?:-start)?\(", text)]


# One block of attention, and a loop over several.
@pytest.mark.parametrize(
    ("plan", "capacity"), [(SPECULATIVE, 600), pytest.param(AUTOREGRESSIVE, 64, marks=pytest.mark.slow)]
)
def test_the_cache_is_split_and_never_gathered(data, mesh, plan, capacity):
    slots, heads, head_dim = capacity + plan.num_speculations + 1, CONFIG.num_key_value_heads, CONFIG.head_dim
    whole = f"f32[16,{heads},{slots},{head_dim}]"

    text = compiled_text(data, mesh, "data", plan, capacity)
    assert f"f32[8,{heads},{slots},{head_dim}]" in text
    assert whole not in text
    # Whether any row goes on, and how many drafts some row can use; nothing of any row.
    assert {kind for kind, _ in collectives(text)} == {"all-reduce"}
    assert all(shape.endswith("[]") for _, shape in collectives(text)), collectives(text)

    text = compiled_text(data, mesh, "tensor", plan, capacity)
    assert f"f32[16,{heads // 2},{slots},{head_dim}]" in text
    assert whole not in text
    # Two sums a layer, behind attention and behind the MLP: in the prompt's pass (of 11 positions; nothing reads the
    # last layer's output there), in drafts and the last draft (of 1) and in verification (of 4).
    found = collectives(text)
    assert {kind for kind, _ in found} == {"all-reduce"}
    layers = {11: 3, 1: 2 + 2, 4: 2} if plan.num_speculations else {11: 3, 1: 4}
    expected = {f"f32[{16 * width},{CONFIG.hidden_size}]": 2 * count for width, count in layers.items()}
    assert collections.Counter(shape for _, shape in found) == expected


@pytest.mark.slow
def test_a_gathered_cache_is_noticed(data, mesh, monkeypatch):
    """The negative control: batch and key heads as one axis, which cannot be split between heads."""

    def merged(left, right, contract):
        shapes = [x.reshape(-1, *x.shape[2:]) for x in (left, right)]
        dimensions = (((contract[0] - 1,), (contract[1] - 1,)), ((0,), (0,)))
        out = jax.lax.dot_general(shapes[0], shapes[1], dimensions, preferred_element_type=np.float32)
        return out.reshape(*left.shape[:2], *out.shape[1:])

    monkeypatch.setattr(attention, "_batched_dot", merged)
    text = compiled_text(data, mesh, "tensor", SPECULATIVE, 65)
    assert ("all-gather", f"f32[16,2,64,{CONFIG.head_dim}]") in collectives(text)  # a block of keys


def test_layouts_that_do_not_divide_are_refused(mesh):
    config = lsjax.LlamaConfig(vocab_size=8, hidden_size=6, intermediate_size=9, num_attention_heads=3)
    with pytest.raises(
        ValueError, match=r"2 devices .* num_attention_heads 3, num_key_value_heads 3, intermediate_size 9"
    ):
        lsjax.tensor_parallel(config, mesh, "parts")
    with pytest.raises(ValueError, match=r"axis: expected one of 'parts', got 'model'"):
        lsjax.tensor_parallel(CONFIG, mesh, "model")


def test_explicit_axes_are_taken_as_automatic_or_refused_by_name(data, mesh):
    explicit = jax.make_mesh((2,), ("parts",), devices=mesh.devices)
    assert lsjax.tensor_parallel(CONFIG, explicit, "parts").tree == lsjax.tensor_parallel(CONFIG, mesh, "parts").tree
    params = jax.device_put(data.params, NamedSharding(explicit, PartitionSpec()))
    with pytest.raises(ValueError, match=r"params: expected a mesh of automatic axes, .* got explicit axes parts"):
        lsjax.generate(params, data.prompts)
    params, _ = place(data, mesh, "data")
    prompts = jax.device_put(data.prompts, NamedSharding(explicit, PartitionSpec("parts")))
    assert_same(generate(params, prompts, data.lengths, 2), on_one_device(2))
    with pytest.raises(ValueError, match=r"tokens: expected a mesh of automatic axes"):
        jax.jit(lambda tokens: lsjax.forward(data.params, tokens))(prompts)
