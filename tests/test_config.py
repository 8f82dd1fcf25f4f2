"""The configuration: what transformers 4 and 5 write means the same, and what contradicts itself is refused."""

import copy
import dataclasses
import json

import pytest
import transformers
from support import LLAMA3_ROPE

import lsjax
from lsjax.config import RopeScaling, token_ids

# As transformers 4 wrote it for a model of Llama 3.2's kind.
OLD = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
MINIMAL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


FACTORS = {"short_factor": [1.0 + n / 32 for n in range(32)], "long_factor": [1 + n for n in range(32)]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LONGROPE = {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 4096}


def read(**changes) -> lsjax.LlamaConfig:
    """The old configuration with changes; an Ellipsis leaves an entry out."""
    return lsjax.LlamaConfig.from_dict({name: value for name, value in (OLD | changes).items() if value is not ...})


def as_new(config: dict) -> dict:
    """A configuration of transformers 4 as transformers 5 writes it."""
    new = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")}
    rope = dict(config.get("rope_scaling") or {})
    rope["rope_type"] = rope.pop("type", rope.get("rope_type", "default"))
    rope["rope_theta"] = config.get("rope_theta", 10000.0)
    return new | {"dtype": config.get("torch_dtype"), "rope_parameters": rope}


def as_transformers(config: dict) -> dict:
    """A configuration as transformers writes it again; a copy, since it fills in the dictionaries it is given."""
    return transformers.LlamaConfig(**copy.deepcopy(config)).to_dict()


def test_a_config_of_transformers_4_is_read():
    config = lsjax.LlamaConfig.from_dict(OLD)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert (config.num_key_value_heads, config.num_key_value_groups, config.head_dim) == (8, 4, 64)
    assert config.eos_token_id == (128001, 128008, 128009)
    assert config.tie_word_embeddings
    assert hash(config) == hash(lsjax.LlamaConfig.from_dict(json.loads(json.dumps(OLD))))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": None, "rope_theta": 10000.0},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2}},
        {"rope_scaling": {"type": "llama3", **LLAMA3_ROPE, "rope_theta": 500000.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
        {"rope_scaling": YARN},
        {"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 24, "beta_slow": 2.0, "truncate": False}},
        {"rope_scaling": {**YARN, "attention_factor": 1.1}},
        {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
        {"rope_scaling": LONGROPE},
        {"rope_scaling": {**LONGROPE, "factor": 16.0, "attention_factor": 1.2}},
        # As Phi-3 has it: the length beside the dictionary.
        {"rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 4096},
    ],
)
def test_configs_of_transformers_4_and_5_mean_the_same(changes):
    old = OLD | changes
    expected = lsjax.LlamaConfig.from_dict(old)
    new = as_new(old)
    assert lsjax.LlamaConfig.from_dict(new) == expected
    assert lsjax.LlamaConfig.from_dict(old | {"rope_parameters": new["rope_parameters"]}) == expected
    assert lsjax.LlamaConfig.from_dict(as_transformers(old)) == expected
    assert lsjax.LlamaConfig.from_dict(as_transformers(new)) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": None},
        {"eos_token_id": 5},
        {"eos_token_id": None},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.5}},
        {"rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0, "truncate": False, "beta_fast": 20}},
        {"rope_scaling": {**YARN, "attention_factor": 1.1}},
        {"rope_scaling": {**LONGROPE, "type": "su", "rope_type": "su"}},
        {"rope_scaling": {**LONGROPE, "factor": 16.0, "attention_factor": 1.2}},
    ],
)
def test_what_is_written_is_read_again_by_lsjax_and_transformers(changes):
    config = read(**changes)
    written = json.loads(json.dumps(config.to_dict()))
    assert lsjax.LlamaConfig.from_dict(written) == config
    assert lsjax.LlamaConfig.from_dict(as_transformers(written)) == config


def test_what_a_scaling_leaves_out_follows_from_the_rest():
    yarn = read(rope_scaling=YARN)
    assert yarn.rope_scaling == RopeScaling("yarn", 4.0, None, None, 32768, None, 32.0, 1.0)
    assert read(rope_scaling={**YARN, "beta_fast": 32, "beta_slow": 1, "truncate": True, "mscale": None}) == yarn
    assert read(rope_scaling={**YARN, "factor": None}) == yarn  # 131072 / 32768
    scaling = read(rope_scaling=LONGROPE).rope_scaling
    assert scaling is not None
    assert len({scaling, read(rope_scaling=LONGROPE).rope_scaling}) == 1
    assert scaling.factor == 131072 / 4096
    assert scaling.long_factor == tuple(FACTORS["long_factor"])
    phi = {"type": "su", **FACTORS}
    assert read(rope_scaling=phi, original_max_position_embeddings=4096).rope_scaling == scaling
    unsaid = dataclasses.replace(scaling, factor=1.0, original_max_position_embeddings=131072)
    assert read(rope_scaling=phi).rope_scaling == unsaid
    # Beside a dictionary that says another length it wins, as in transformers.
    both = {**LONGROPE, "original_max_position_embeddings": 131072}
    assert read(rope_scaling=both, original_max_position_embeddings=4096).rope_scaling == scaling
    # Types that have no such length pass it over, as transformers does.
    assert read(rope_scaling=None, original_max_position_embeddings=7) == read(rope_scaling=None)


def test_lengths_that_a_scaling_implies():
    assert read(rope_scaling=YARN).trained_length == 131072
    assert read(rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=4096).trained_length == 8192
    assert read(rope_scaling=YARN).short_length is read(rope_scaling=None).short_length is None
    assert read(rope_scaling=LONGROPE).short_length == 4096
    assert read(rope_scaling={**LONGROPE, "long_factor": FACTORS["short_factor"]}).short_length is None


def test_absent_entries_have_transformers_defaults():
    config = lsjax.LlamaConfig.from_dict(MINIMAL)
    assert config == lsjax.LlamaConfig.from_dict(transformers.LlamaConfig(**MINIMAL).to_dict())
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (32, 128, 10000.0)
    nulls = dict.fromkeys(("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters"))
    assert lsjax.LlamaConfig.from_dict(MINIMAL | nulls) == config


def test_special_ids_of_the_generation_config_win():
    generation = {"eos_token_id": [1, 2], "pad_token_id": 3, "bos_token_id": None, "temperature": 0.6}
    config = lsjax.LlamaConfig.from_dict(OLD, generation)
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == ((1, 2), 3, 128000)
    assert lsjax.LlamaConfig.from_dict(OLD, {}) == lsjax.LlamaConfig.from_dict(OLD)
    assert read(pad_token_id=-1).pad_token_id is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type: expected 'llama', got 'mistral'"),
        ({"model_type": ...}, "model_type: expected 'llama', got None"),
        ({"hidden_size": ..., "vocab_size": ...}, "config.json lacks vocab_size, hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu' or 'swish', got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: expected none, got {'bits': 4}"),
        ({"sliding_window": 4096}, "sliding_window: expected none, got 4096"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1 or 1.0, got 0.5"),
        ({"hidden_size": "2048"}, "hidden_size: expected an int above 0, got '2048'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected an int above 0, got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected an int above 0, got True"),
        ({"max_position_embeddings": None}, "max_position_embeddings: expected an int above 0, got None"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        ({"head_dim": 63}, "head_dim: expected an even int above 0, got 63"),
        ({"head_dim": ..., "hidden_size": 2047}, "hidden_size 2047 is not a multiple of num_attention_heads 32"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: expected a number above 0, got 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a number above 0, got nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false, got 'yes'"),
        ({"attention_bias": 1}, "attention_bias: expected true or false, got 1"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id: expected token ids of at least 0"),
        ({"bos_token_id": [1]}, r"bos_token_id: expected an int or None, got \[1\]"),
    ],
)
def test_what_is_no_llama_or_no_sense_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read(**changes)


LLAMA3 = OLD["rope_scaling"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            (
                {"rope_scaling": {"rope_type": kind, "factor": 2.0}},
                f"rope_type '{kind}' is not supported: expected one of",
            )
            for kind in ("proportional", "axial", "ntk")
        ),
        ({"rope_parameters": {"rope_type": "mrope", "factor": 2.0}}, "rope_type 'mrope' is not supported"),
        ({"rope_scaling": {"type": "linear", "rope_type": "llama3", "factor": 2.0}}, "contradict themselves"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_scaling and rope_parameters contradict each other"),
        ({"rope_parameters": {**LLAMA3, "factor": 8.0}}, "rope_scaling and rope_parameters contradict each other"),
        ({"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}}, "rope_theta is given twice and differs"),
        ({"rope_scaling": {**LLAMA3, "rope_theta": 1.0}}, "rope_theta is given twice and differs: 500000.0 and 1.0"),
        ({"rope_scaling": {"rope_type": "linear"}}, "missing factor, unexpected none"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}},
            "missing none, unexpected beta_fast",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "missing high_freq_factor, low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor of rope_type 'linear': expected at least 1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor of rope_type 'linear': expected a number"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor must exceed low_freq_factor"),
        ({"rope_scaling": "linear"}, "rope parameters: expected an object, got 'linear'"),
        ({"rope_scaling": ..., "rope_theta": -1.0}, "rope_theta: expected a number above 0, got -1.0"),
        ({"rope_scaling": ..., "rope_theta": [1.0]}, r"rope_theta: expected a number above 0, got \[1.0\]"),
        (
            {"rope_theta": ..., "rope_parameters": {**LLAMA3, "rope_theta": [1.0]}},
            "rope_scaling and rope_parameters contradict each other",
        ),
        ({"rope_scaling": {"rope_type": ["linear"], "factor": 2.0}}, "is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "missing factor, unexpected none"),
        ({"rope_scaling": {**YARN, "low_freq_factor": 1.0}}, "missing none, unexpected low_freq_factor"),
        (
            {"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 2}},
            "beta_fast must be at least beta_slow, got 1 and 2",
        ),
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, "beta_fast of rope_type 'yarn': expected a number above 0, got 0"),
        (
            {"rope_scaling": {**YARN, "mscale": -1}},
            "mscale of rope_type 'yarn': expected a number of at least 0, got -1",
        ),
        (
            {"rope_scaling": {**YARN, "attention_factor": "1"}},
            "attention_factor of rope_type 'yarn': expected a number",
        ),
        (
            {"rope_scaling": {**YARN, "truncate": None}},
            "truncate of rope_type 'yarn': expected true or false, got None",
        ),
        ({"rope_scaling": {**YARN, "factor": None, "original_max_position_embeddings": 262144}}, "at least 1, got 0.5"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_type 'yarn': expected a rope_theta above 1, got 1.0"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            "missing long_factor, short_factor, unexpected none",
        ),
        (
            {"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 31}},
            "short_factor: expected head_dim / 2 = 32 numbers, got 31",
        ),
        (
            {"rope_scaling": {**LONGROPE, "long_factor": 4.0}},
            "long_factor .* expected a list of numbers above 0, got 4.0",
        ),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1, 0]}}, "long_factor .* expected a list of numbers above 0"),
        (
            {"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}},
            "original_max_position_embeddings of rope_type 'longrope': expected an int above 1, got 1",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1000.0}}, "missing none, unexpected alpha"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2},
            "expected a head_dim of at least 4, got 2",
        ),
        (
            {"rope_scaling": {"type": "su", "rope_type": "yarn"}},
            "contradict themselves: type 'longrope' and rope_type 'yarn'",
        ),
    ],
)
def test_rope_that_is_unknown_or_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        read(**changes)


@pytest.mark.parametrize("content", [[], None, "llama", 3])
def test_a_config_that_is_no_object_is_refused(content):
    with pytest.raises(ValueError, match=r"config\.json: expected an object"):
        lsjax.LlamaConfig.from_dict(content)


def test_rope_given_directly():
    kwargs = {name: value for name, value in MINIMAL.items() if name != "model_type"}

    def configured(rope_scaling):
        return lsjax.LlamaConfig(**kwargs, rope_scaling=rope_scaling)

    given = configured({"rope_type": "linear", "factor": 4.0, "rope_theta": 777.0})
    assert (given.rope_theta, given.rope_scaling) == (777.0, RopeScaling("linear", 4.0))
    assert dataclasses.replace(given, rope_theta=500.0).rope_scaling == given.rope_scaling
    assert configured(LLAMA3_ROPE).rope_theta == 1000.0
    with pytest.raises(ValueError, match=r"rope_type: expected one of default, linear, dynamic, yarn, .*, got 'ntk'"):
        RopeScaling("ntk", 2.0)
    with pytest.raises(ValueError, match="low_freq_factor has no meaning for rope_type 'linear'"):
        RopeScaling("linear", 2.0, low_freq_factor=1.0)
    with pytest.raises(ValueError, match="rope_scaling: expected a dictionary or RopeScaling, got 4"):
        configured(4)


def test_the_config_is_frozen_and_hashable():
    config = lsjax.LlamaConfig.from_dict(OLD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.vocab_size = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert len({config, lsjax.LlamaConfig.from_dict(OLD), dataclasses.replace(config, vocab_size=7)}) == 2


def test_token_ids():
    assert token_ids("x", None) == ()
    assert token_ids("x", 3) == (3,)
    assert token_ids("x", [3, 4]) == (3, 4)
    for wrong in (-1, "3", [1, -2], 1.5, True, [[1]]):
        with pytest.raises(ValueError, match="x: expected token ids of at least 0, got"):
            token_ids("x", wrong)


def test_code_llama_34b_loads():
    """Its config.json as published, and the number of parameters that follows from the sizes by hand."""
    published = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 8192,
        "initializer_range": 0.02,
        "intermediate_size": 22016,
        "max_position_embeddings": 16384,
        "model_type": "llama",
        "num_attention_heads": 64,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32000,
    }
    config = lsjax.LlamaConfig.from_dict(published)
    assert (config.rope_theta, config.rope_scaling, config.head_dim) == (1e6, None, 128)
    layer = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 22016 + 2 * 8192
    assert lsjax.Params.abstract(config).num_parameters == 48 * layer + 2 * 32000 * 8192 + 8192 == 33_743_970_304
