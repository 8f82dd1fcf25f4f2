"""Checkpoints that do not fit, damaged in every way: one error, everything in it, before anything is returned."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from checkpoints import assert_same_arrays, model_config, random_model, write_config, write_plain, write_shards
from safetensors.numpy import load_file, save_file

from lsjax.convert.assemble import assemble
from lsjax.convert.checkpoint import Checkpoint, CheckpointError, Listing, Stored
from lsjax.convert.names import HUGGINGFACE
from lsjax.io import load


def test_one_error_names_everything_that_is_wrong(checkpoint):
    directory, tensors = checkpoint
    layer = "model.layers.1."
    del tensors[layer + "mlp.up_proj.weight"]
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((80, 48), np.float32)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(48, np.float32)
    tensors[layer + "self_attn.q_proj.weight"] = np.ones((47, 48), np.float32)
    tensors[layer + "mlp.gate_proj.weight"] = tensors[layer + "mlp.gate_proj.weight"].T.copy()
    tensors["model.norm.weight"] = np.ones(48, np.int32)
    parts = write_shards(directory, tensors, count=5)
    absent, cut, second, _, _ = parts
    (directory / absent).unlink()
    whole = (directory / cut).read_bytes()
    (directory / cut).write_bytes(whole[:-10])
    last = next(reversed(parts))
    doubled, dropped = parts[last][0], parts[second][0]
    held = load_file(directory / second) | {doubled: tensors[doubled]}
    del held[dropped]
    save_file(held, directory / second)
    with pytest.raises(CheckpointError) as error:
        load(directory)
    problems = list(error.value.problems)
    assert str(error.value) == f"cannot load {directory}:\n  " + "\n  ".join(problems)

    def take(*words):
        found = [line for line in problems if all(word in line for word in words)]
        assert len(found) == 1, (words, problems)
        problems.remove(found[0])

    take("absent: " + absent, *parts[absent])
    take("truncated or altered: " + cut, f"{len(whole) - 10:,} bytes", *parts[cut])
    take(f"missing: {dropped}, which model.safetensors.index.json places in {second}")
    take("twice: ", doubled, second, last)
    readable = {name for file, names in parts.items() for name in names if file not in (absent, cut)} - {dropped}
    expected = {
        layer + "mlp.up_proj.weight": ("missing", "[80, 48]"),
        "model.layers.2.mlp.up_proj.weight": ("unexpected", "[80, 48]"),
        "model.layers.0.self_attn.q_proj.bias": ("unexpected", "[48]"),
        layer + "self_attn.q_proj.weight": ("wrong shape", "expected [48, 48], got [47, 48]"),
        layer + "mlp.gate_proj.weight": ("wrong shape", "expected [80, 48], got [48, 80]"),
        "model.norm.weight": ("wrong dtype", "expected F16, BF16, F32, F64, got I32"),
    }
    assert len(readable & expected.keys()) >= 3
    for name, words in expected.items():
        if name in readable or words[0] == "missing":
            take(name, *words)
    assert not problems


def test_a_file_that_cannot_be_read_is_the_only_problem(checkpoint):
    directory, _ = checkpoint
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"truncated or altered: model\.safetensors") as error:
        load(directory)
    assert len(error.value.problems) == 1


def test_missing_tensors_come_in_the_order_of_the_layers(tmp_path):
    params = random_model(4, num_hidden_layers=12)
    tensors = write_plain(tmp_path, params)
    save_file({name: value for name, value in tensors.items() if "up_proj" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    names = [f"missing: model.layers.{n}.mlp.up_proj.weight [80, 48]" for n in range(12)]
    assert list(error.value.problems) == names


@pytest.mark.parametrize("difference", ["none", "one number", "dtype", "shape", "twice"])
def test_a_stored_copy_of_a_tied_head_must_be_the_embedding(difference, tmp_path):
    params = random_model(5, tie_word_embeddings=True)
    tensors = write_plain(tmp_path, params)
    head = tensors["model.embed_tokens.weight"].copy()
    if difference == "one number":
        head[3, 4] += 1e-3
    tensors["lm_head.weight"] = {"dtype": head.astype(np.float16), "shape": head.T.copy()}.get(difference, head)
    save_file(tensors, tmp_path / "model.safetensors")
    if difference == "twice":
        parts = write_shards(tmp_path, tensors)
        other = next(file for file, names in parts.items() if "lm_head.weight" not in names)
        save_file({**load_file(tmp_path / other), "lm_head.weight": head}, tmp_path / other)
    if difference == "none":
        assert_same_arrays(load(tmp_path), params)
        return
    with pytest.raises(CheckpointError, match=r"lm_head\.weight") as error:
        load(tmp_path)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("{", ["not JSON: model.safetensors.index.json"]),
        ("[1]", ["wrong index", "weight_map"]),
        ('{"weight_map": {}}', ["wrong index", "weight_map"]),
        ('{"weight_map": {"model.norm.weight": 3}}', ["expected a file name, got 3"]),
        ('{"weight_map": {"model.norm.weight": "../model.safetensors"}}', ["expected a file name, got '../model"]),
        ('{"weight_map": {"model.norm.weight": "a", "model.norm.weight": "b"}}', ["twice: model.norm.weight"]),
    ],
)
def test_a_broken_index_is_named(index, words, checkpoint):
    directory, _ = checkpoint
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError) as error:
        load(directory)
    assert any(all(word in line for word in words) for line in error.value.problems), error.value


def test_a_tensor_that_the_index_leaves_out_is_unexpected(checkpoint):
    directory, tensors = checkpoint
    write_shards(directory, tensors)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content))
    with pytest.raises(
        CheckpointError, match=r"unexpected: model\.norm\.weight .* not in model\.safetensors\.index"
    ) as e:
        load(directory)
    assert len(e.value.problems) == 1


def test_a_name_that_stands_twice_in_a_header_is_named(checkpoint):
    directory, _ = checkpoint
    path = directory / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].decode().rstrip()
    entry = json.dumps(json.loads(header)["model.norm.weight"])
    header = f'{header[:-1]},"model.norm.weight":{entry}}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + data[8 + size :])
    with pytest.raises(CheckpointError, match=r"twice: model\.norm\.weight in model\.safetensors") as error:
        load(directory)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "model_type: expected 'llama', got 'mistral'"),
        ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rope_type 'mrope' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu' or 'swish', got 'gelu'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta is given twice and differs"),
    ],
)
def test_a_config_that_is_not_supported_is_refused_by_name(changes, message, checkpoint, small):
    directory, _ = checkpoint
    write_config(directory, small.config, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(directory)


@pytest.mark.parametrize("content", ["", "[]", "{", "3", "[" * 100_000, b"\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_config_that_is_no_json_object_is_refused(name, content, checkpoint):
    directory, _ = checkpoint
    (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=name):
        load(directory)


def test_a_directory_without_config_or_weights_says_so(checkpoint):
    directory, _ = checkpoint
    (directory / "model.safetensors").rename(directory / "pytorch_model.pt")
    with pytest.raises(CheckpointError, match=r"expected model\.safetensors.*found config\.json, pytorch_model\.pt"):
        load(directory)
    (directory / "pytorch_model.pt").rename(directory / "model.safetensors")
    (directory / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"absent: config\.json"):
        load(directory)


def test_a_depth_that_no_checkpoint_has_costs_nothing(checkpoint, small):
    directory, _ = checkpoint
    write_config(directory, small.config, num_hidden_layers=10**9)
    with pytest.raises(CheckpointError, match="1000000000 layers in the configuration, 21 tensors in the files"):
        load(directory)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "complex64", "half-ish", 7, "float64"])
def test_a_dtype_that_weights_cannot_have_is_refused(dtype, checkpoint):
    with pytest.raises(ValueError, match=r"dtype: expected bfloat16, float16 or float32 .*, got "):
        load(checkpoint[0], dtype)


def test_numbers_beyond_a_dtypes_range_are_refused_not_made_infinite(checkpoint):
    directory, tensors = checkpoint
    for name, where, value in (
        ("model.norm.weight", 5, 7e4),
        ("model.layers.1.input_layernorm.weight", 0, np.inf),  # as stored: no concern of the loader's
    ):
        tensors[name] = tensors[name].copy()
        tensors[name][where] = value
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight in model\.safetensors holds numbers beyond the range of float16"
    ) as error:
        load(directory, "float16")
    assert len(error.value.problems) == 1
    assert np.isinf(load(directory, "bfloat16").tree["layers_1"]["input_layernorm"]["scale"]).sum() == 1


def test_no_data_is_read_when_a_header_is_wrong():
    def read():
        raise AssertionError

    config = model_config(num_hidden_layers=1)
    listing = Listing((Stored("model.norm.weight", (48,), "F32", "f", read),))
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight \[131, 48\]"):
        assemble(Checkpoint(Path("x"), "safetensors", HUGGINGFACE, listing, config))


def test_damaged_files_are_refused_or_load(checkpoint):
    directory, _ = checkpoint
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = random.Random(0)
    refused = 0
    for case in range(120):
        data = bytearray(whole)
        if case % 3 == 0:
            del data[rng.randrange(len(data)) :]
        for _ in range(rng.randint(1, 3)):
            where = rng.randrange(min(header, len(data) or 1))
            if where < len(data):
                data[where] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        try:
            load(directory)
        except CheckpointError:
            refused += 1
    assert refused > 100
