"""Scaled rotary positions in GGUF files, against what llama.cpp computes from the same entries."""

import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import gguf_metadata, gguf_tensors, random_model, write_gguf

from lsjax.convert.checkpoint import CheckpointError
from lsjax.io import load
from lsjax.model.rope import rotation

pytest.importorskip("gguf")

HEAD, THETA, CONTEXT = 64, 500000.0, 2048
KIND, FACTOR, ORIGINAL = (f"llama.rope.scaling.{name}" for name in ("type", "factor", "original_context_length"))
ATTENTION = "llama.rope.scaling.attn_factor"


@pytest.fixture(scope="module")
def small():
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "head_dim": HEAD}
    return random_model(1, **sizes, num_hidden_layers=1, rope_theta=THETA, max_position_embeddings=CONTEXT)


def read(small, tmp_path, changes, factors):
    tensors = gguf_tensors(small) | {name: np.asarray(value, np.float32) for name, value in factors.items()}
    write_gguf(tmp_path / "model.gguf", gguf_metadata(small.config, **changes), tensors)
    return load(tmp_path / "model.gguf").config


def llama3_factors(factor, low=1.0, high=4.0, original=8192, theta=THETA):
    """As llama.cpp's converter makes them (``LlamaModel.generate_extra_tensors``)."""
    found = []
    for frequency in theta ** (-np.arange(0, HEAD, 2) / HEAD):
        wavelength = 2 * np.pi / frequency
        smooth = (original / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        found.append(1 if wavelength < original / high else factor if wavelength > original / low else between)
    return np.array(found)


def llama_cpp_rotation(changes, factors, positions, length):
    """Cosines and sines ``[..., head_dim / 2]`` as ``ggml_rope_ext`` has them, in float64."""
    kind = changes.get(KIND, "linear")
    factor = 1 if kind == "none" else changes.get(FACTOR, changes.get("llama.rope.scale_linear", 1)) or 1
    original = changes.get(ORIGINAL, CONTEXT)
    pair = np.arange(HEAD // 2)
    divisors = factors.get("rope_freqs.weight", np.ones(HEAD // 2))
    if kind == "longrope":
        divisors = factors[f"rope_factors_{'long' if length > original else 'short'}.weight"]
    angle = positions[:, None] * THETA ** (-2.0 * pair / HEAD) / divisors
    scale = changes.get(ATTENTION, 1)
    if kind == "yarn":
        ends = [
            HEAD * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(THETA))
            for turns in (changes.get("llama.rope.scaling.yarn_beta_fast", 32), 1)
        ]
        low, high = max(0, np.floor(ends[0])), min(HEAD - 1, np.ceil(ends[1]))
        mix = 1 - np.clip((pair - low) / max(0.001, high - low), 0, 1)
        angle = angle / factor * (1 - mix) + angle * mix
        scale = scale * (1 + 0.1 * np.log(factor))
    else:
        angle = angle / factor
    return np.cos(angle) * scale, np.sin(angle) * scale


BOTH = ("rope_factors_short.weight", "rope_factors_long.weight")
OWN = np.linspace(1, 9, HEAD // 2)
CASES = {
    "nothing": ({}, {}, None),
    "linear": ({KIND: "linear", FACTOR: 4.0}, {}, "linear"),
    "linear is llama.cpp's default": ({FACTOR: 4.0}, {}, "linear"),
    "an old linear": ({"llama.rope.scale_linear": 2.0}, {}, "linear"),
    "none beside a factor": ({KIND: "none", FACTOR: 4.0}, {}, None),
    "linear by 1": ({KIND: "linear", FACTOR: 1.0}, {}, None),
    "a factor of 0 is none": ({KIND: "linear", FACTOR: 0.0}, {}, None),
    "yarn": ({KIND: "yarn", FACTOR: 8.0, ORIGINAL: 256}, {}, "yarn"),
    "yarn without an original length": ({KIND: "yarn", FACTOR: 8.0}, {}, "yarn"),
    "yarn by 1": ({KIND: "yarn", FACTOR: 1.0}, {}, None),
    "yarn, attention and beta": (
        {KIND: "yarn", FACTOR: 8.0, ORIGINAL: 256, ATTENTION: 0.5, "llama.rope.scaling.yarn_beta_fast": 16.0},
        {},
        "yarn",
    ),
    "longrope": (
        {KIND: "longrope", ORIGINAL: 128, ATTENTION: 1.25},
        {"rope_factors_short.weight": OWN, "rope_factors_long.weight": OWN[::-1]},
        "longrope",
    ),
    "Llama 3.1": ({}, {"rope_freqs.weight": llama3_factors(8.0)}, "llama3"),
    "Llama 3.2": ({}, {"rope_freqs.weight": llama3_factors(32.0)}, "llama3"),
    "Llama 3.1 made longer": ({}, {"rope_freqs.weight": llama3_factors(16.0, original=4096)}, "llama3"),
    "other bands": ({}, {"rope_freqs.weight": llama3_factors(8.0, low=2.0, high=3.0)}, "longrope"),
    "factors of its own": ({}, {"rope_freqs.weight": OWN}, "longrope"),
    "factors below 1": ({}, {"rope_freqs.weight": OWN / 10}, "longrope"),
    "factors of 1": ({}, {"rope_freqs.weight": np.ones(HEAD // 2)}, None),
    "flags that change nothing": ({"llama.expert_count": 0, "llama.rope.scaling.finetuned": True}, {}, None),
}


@pytest.mark.parametrize("case", CASES)
def test_rotations_are_llama_cpps(case, small, tmp_path):
    changes, factors, kind = CASES[case]
    config = read(small, tmp_path, changes, factors)
    assert (config.rope_scaling and config.rope_scaling.rope_type) == kind
    positions = np.arange(120)
    for length in (120, 2000):
        expected = llama_cpp_rotation(changes, factors, positions, length)
        for found, wanted in zip(rotation(config, jnp.asarray(positions), length), expected, strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_llama_3s_parameters_are_found_again(small, tmp_path):
    for factor in (8.0, 32.0):
        scaling = read(small, tmp_path, {}, {"rope_freqs.weight": llama3_factors(factor)}).rope_scaling
        assert scaling is not None
        found = (scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor)
        assert (*found, scaling.original_max_position_embeddings) == (factor, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("changes", "factors", "message"),
    [
        ({KIND: "ntk"}, {}, r"llama\.rope\.scaling\.type: expected 'none', 'linear', 'yarn' or 'longrope'.*got 'ntk'"),
        ({KIND: "longrope"}, {}, "with both tensors of factors"),
        (
            {KIND: "longrope", FACTOR: 2.0},
            {"rope_factors_short.weight": OWN, "rope_factors_long.weight": OWN},
            "no other",
        ),
        ({KIND: "longrope"}, {"rope_factors_short.weight": OWN}, "with both tensors of factors"),
        ({}, {"rope_factors_short.weight": OWN}, r"rope_factors_short\.weight: rope factors with .*'linear'"),
        ({FACTOR: 2.0}, {"rope_freqs.weight": OWN}, r"rope_freqs\.weight: rope factors with .*factor 2\.0"),
        ({KIND: "yarn", FACTOR: 2.0}, {"rope_freqs.weight": OWN}, r"rope_freqs\.weight: rope factors with .*'yarn'"),
        ({KIND: "yarn", FACTOR: 0.5}, {}, "factor of rope_type 'yarn': expected at least 1"),
        ({KIND: "yarn", FACTOR: 2.0, ORIGINAL: 0}, {}, "original_max_position_embeddings"),
        ({KIND: "yarn", FACTOR: 2.0, "llama.rope.scaling.yarn_log_multiplier": 0.1}, {}, "yarn_log_multiplier is not"),
        ({KIND: "linear", FACTOR: float("nan")}, {}, r"llama\.rope\.scaling\.factor: expected a number"),
        ({KIND: "linear", FACTOR: "4"}, {}, r"llama\.rope\.scaling\.factor: expected a number"),
        ({ATTENTION: 2.0}, {}, r"llama\.rope\.scaling\.attn_factor: expected 1"),
        ({}, {"rope_freqs.weight": OWN[1:]}, r"rope_freqs\.weight: expected 32 floating-point numbers, got \[31\]"),
        ({}, {"rope_freqs.weight": -OWN}, "short_factor of rope_type 'longrope': expected a list of numbers above 0"),
        ({}, {"rope_freqs.weight": OWN * np.nan}, "short_factor of rope_type 'longrope'"),
    ],
)
def test_scalings_that_lsjax_does_not_compute_are_refused_by_name(changes, factors, message, small, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        read(small, tmp_path, changes, factors)
