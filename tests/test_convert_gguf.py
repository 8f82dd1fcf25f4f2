"""GGUF files: written here as llama.cpp's converter does, and read by lsjax."""

import random
import sys

import jax
import numpy as np
import pytest
from checkpoints import assert_same_arrays, gguf_metadata, gguf_tensors, random_model, write_gguf

import lsjax
from lsjax.convert import names
from lsjax.convert.checkpoint import CheckpointError
from lsjax.io import load
from lsjax.params import flatten

gguf = pytest.importorskip("gguf")

VARIANTS = {
    "tied, grouped keys": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "untied, all biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 3},
    "explicit head_dim, theta": {"head_dim": 20, "rope_theta": 123456.0, "rms_norm_eps": 1e-5},
}


@pytest.fixture(scope="module")
def small():
    return random_model(1, num_hidden_layers=2, num_key_value_heads=2)


@pytest.fixture
def file(small, tmp_path):
    """A GGUF file that loads."""
    write_gguf(tmp_path / "model.gguf", gguf_metadata(small.config), gguf_tensors(small))
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_converted_model_is_the_model(variant, tmp_path):
    params = random_model(2, **VARIANTS[variant])
    write_gguf(tmp_path / "model.gguf", gguf_metadata(params.config), gguf_tensors(params))
    loaded = load(tmp_path / "model.gguf")
    assert loaded.config == params.config
    assert_same_arrays(loaded, params)


def test_leaving_the_heads_rows_interleaved_would_change_the_logits(small, file, monkeypatch):
    tokens = np.arange(40) % small.config.vocab_size
    expected = np.asarray(lsjax.forward(small, tokens))
    assert expected.std() >= 1
    np.testing.assert_array_equal(lsjax.forward(load(file), tokens), expected)
    plain = names.to_flax_layout
    monkeypatch.setattr(
        "lsjax.convert.assemble.to_flax_layout",
        lambda transform, array, config: plain("keep" if transform == "keep" else "transpose", array, config),
    )
    assert np.abs(np.asarray(lsjax.forward(load(file), tokens)) - expected).max() > 0.1


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_stored_types_are_dequantized_to_float32(kind, tmp_path):
    params = random_model(3, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    tensors = gguf_tensors(params)
    kinds = {name: kind for name, value in tensors.items() if value.ndim == 2}
    write_gguf(tmp_path / "model.gguf", gguf_metadata(params.config), tensors, kinds)
    loaded = load(tmp_path / "model.gguf")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded)} == {"float32"}
    quant = gguf.GGMLQuantizationType[kind]
    rounded = {
        name: gguf.dequantize(gguf.quantize(value, quant), quant).astype(np.float32) if name in kinds else value
        for name, value in tensors.items()
    }
    write_gguf(tmp_path / "rounded.gguf", gguf_metadata(params.config), rounded)
    assert_same_arrays(loaded, load(tmp_path / "rounded.gguf"))
    assert any(np.any(np.asarray(leaf) != flatten(params.tree)[path]) for path, leaf in flatten(loaded.tree).items())
    assert load(tmp_path / "model.gguf", "bfloat16").dtype == "bfloat16"


def dequantizable():
    """Every type that the installed package dequantizes."""
    found = []
    for kind in gguf.GGMLQuantizationType:
        try:
            gguf.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return found


def random_blocks(rng, kind, shape):
    """Quantized numbers, all of them finite: random bytes where the package cannot make them."""
    try:
        return gguf.quantize(rng.normal(size=shape).astype(np.float32), kind)
    except NotImplementedError:
        pass
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.empty((shape[0], shape[1] // block, size), np.uint8)
    for row in rows.reshape(-1, size):
        row[:] = rng.integers(0, 256, size)
        while not np.isfinite(gguf.dequantize(row, kind)).all():
            row[:] = rng.integers(0, 256, size)
    return rows.reshape(shape[0], -1)


@pytest.mark.parametrize("kind", dequantizable())
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the package, for scales that the loop above throws away
def test_every_type_that_the_package_dequantizes_loads(kind, tmp_path):
    params = random_model(
        3, num_hidden_layers=1, vocab_size=5, hidden_size=256, intermediate_size=256, num_attention_heads=2
    )
    quant, tensors = gguf.GGMLQuantizationType[kind], gguf_tensors(params)
    writer_kinds, expected = {}, dict(tensors)
    rng = np.random.default_rng(0)
    for name in ("token_embd.weight", "blk.0.ffn_down.weight"):
        stored = random_blocks(rng, quant, tensors[name].shape)
        expected[name] = gguf.dequantize(stored, quant).astype(np.float32).reshape(tensors[name].shape)
        tensors[name], writer_kinds[name] = stored, quant
    write_gguf(tmp_path / "model.gguf", gguf_metadata(params.config), tensors, stored_kinds=writer_kinds)
    tree = flatten(load(tmp_path / "model.gguf").tree)
    np.testing.assert_array_equal(tree["embed_tokens/embedding"], expected["token_embd.weight"])
    np.testing.assert_array_equal(tree["layers_0/mlp/down_proj/kernel"], expected["blk.0.ffn_down.weight"].T)


def test_float64_is_read_as_float32_and_refused_beyond_its_range(small, tmp_path):
    tensors = gguf_tensors(small)
    tensors["output_norm.weight"] = tensors["output_norm.weight"].astype(np.float64) + 1e-12
    write_gguf(tmp_path / "a.gguf", gguf_metadata(small.config), tensors)
    assert_same_arrays(load(tmp_path / "a.gguf"), small)
    tensors["output_norm.weight"][3] = 1e300
    write_gguf(tmp_path / "b.gguf", gguf_metadata(small.config), tensors)
    with pytest.raises(CheckpointError, match=r"out of range: output_norm\.weight"):
        load(tmp_path / "b.gguf")


def test_absent_entries_have_llama_cpps_defaults_and_every_end_of_a_turn_stops(small, tmp_path):
    absent = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base")
    changes = dict.fromkeys(f"llama.{name}" for name in absent)
    changes |= {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 2, "tokenizer.ggml.bos_token_id": None}
    params = random_model(4)
    write_gguf(tmp_path / "model.gguf", gguf_metadata(params.config, **changes), gguf_tensors(params))
    config = load(tmp_path / "model.gguf").config
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (6, 8, 10000.0)
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id) == ((2, 9), None, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"general.architecture": "qwen2"}, "general.architecture: expected 'llama', got 'qwen2'"),
        ({"llama.expert_count": 8}, "llama.expert_count is not supported, got 8"),
        ({"llama.logit_scale": 0.5}, "llama.logit_scale is not supported, got 0.5"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window is not supported, got 64"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count: expected the heads' size 8, got 4"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": "two"}, "num_hidden_layers: expected an int above 0, got 'two'"),
        ({"llama.block_count": 2**31}, "num_hidden_layers: expected at most 2147483647, got 2147483648"),
        ({"llama.block_count": 2**31 - 1}, "2147483647 layers in the configuration, 21 tensors in the files"),
        ({"llama.attention.head_count": [6, 6]}, r"num_attention_heads: expected an int above 0, got \[6, 6\]"),
        ({"llama.embedding_length": 2**31 - 8}, "wrong shape: token_embd.weight"),
    ],
)
def test_what_lsjax_does_not_compute_is_refused_by_name(changes, message, small, tmp_path):
    write_gguf(tmp_path / "model.gguf", gguf_metadata(small.config, **changes), gguf_tensors(small))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model.gguf")


def test_tensors_that_do_not_fit_are_listed(small, tmp_path):
    tensors = gguf_tensors(small)
    tensors["blk.0.ffn_gate_inp.weight"] = tensors.pop("blk.0.ffn_gate.weight")
    tensors["blk.1.ffn_norm.weight"] = np.ones(47, np.float32)
    tensors["output_norm.weight"] = np.ones(48, np.int32)
    tensors["blk.1.attn_norm.weight"] = np.ones(48, np.int8)
    write_gguf(tmp_path / "b.gguf", gguf_metadata(small.config), tensors)
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "b.gguf")
    assert sorted(error.value.problems) == [
        "missing: blk.0.ffn_gate.weight [80, 48]",
        "unexpected: blk.0.ffn_gate_inp.weight [80, 48] in b.gguf",
        "wrong dtype: blk.1.attn_norm.weight in b.gguf: expected F16, BF16, F32, F64, got ggml I8",
        "wrong dtype: output_norm.weight in b.gguf: expected F16, BF16, F32, F64, got ggml I32",
        "wrong shape: blk.1.ffn_norm.weight in b.gguf: expected [48], got [47]",
    ]


def test_damaged_files_are_refused_or_load(file):
    whole = file.read_bytes()
    header = whole.index(b"output_norm.weight") + 64
    rng = random.Random(0)
    refused = 0
    for case in range(150):
        data = bytearray(whole)
        if case % 3 == 0:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.randint(1, 3)):
            where = rng.randrange(header)
            if where < len(data):
                data[where] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        try:
            load(file)
        except CheckpointError:
            refused += 1
    assert refused > 100


def test_a_damaged_length_allocates_nothing(small, tmp_path):
    import tracemalloc

    path = tmp_path / "model.gguf"
    metadata = gguf_metadata(small.config) | {"tokenizer.ggml.token_type": [1, 2, 3, 4]}
    write_gguf(path, metadata, gguf_tensors(small) | {"extra": np.zeros(1_000_000, np.float32)})
    whole = path.read_bytes()
    where = whole.index(b"token_type") + len("token_type") + 8  # past the array's two types: its length
    tracemalloc.start()
    try:
        for length in (2**60, 2**40, 900_000):
            path.write_bytes(whole[:where] + length.to_bytes(8, "little") + whole[where + 8 :])
            with pytest.raises(CheckpointError, match="truncated or altered"):
                load(path)
        assert tracemalloc.get_traced_memory()[1] < 10 * len(whole)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", [b"GG", b"GGUF", b"PK\x03\x04" * 20, b"GGUF\x07\0\0\0" + bytes(40)])
def test_a_file_that_is_no_gguf_is_refused(content, tmp_path):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match="not GGUF, truncated or altered"):
        load(tmp_path / "model.gguf")


def test_without_the_gguf_package_the_extra_is_named(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'lsjax\[demo\]'"):
        load(file)
