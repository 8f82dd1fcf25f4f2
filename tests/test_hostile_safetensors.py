"""Hostile safetensors directories: JSON, headers and indexes that lie, and files that are no files."""

import json
import os
import random
import stat

import numpy as np
import pytest
from checkpoints import model_config, write_config, write_shards
from hostile import fails, flip, loads_or_fails, mutate_json, peak_memory, truncate
from safetensors.numpy import save_file

from lsjax.io import load

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 2471645608\n"
)
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def one(tmp_path):
    """One layer in a directory that loads."""
    directory = tmp_path / "model"
    directory.mkdir()
    config = model_config(num_hidden_layers=1, vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2)
    write_config(directory, config)
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (8, 8), "lm_head.weight": (8, 8), "model.norm.weight": (8,)}
    for name in ("q", "k", "v", "o"):
        shapes[f"model.layers.0.self_attn.{name}_proj.weight"] = (8, 8)
    for name in ("gate", "up", "down"):
        shapes[f"model.layers.0.mlp.{name}_proj.weight"] = (8, 8)
    for name in ("input", "post_attention"):
        shapes[f"model.layers.0.{name}_layernorm.weight"] = (8,)
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    load(directory)
    return directory, tensors


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers: expected at most 2147483647, got 1000000000000"),
        ({"num_hidden_layers": 2**31 - 1}, "2147483647 layers in the configuration, 12 tensors"),
        ({"num_hidden_layers": 200}, "missing: model.layers.199.mlp.up_proj.weight"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected an int above 0, got 0"),
        ({"num_hidden_layers": 1.0}, "num_hidden_layers: expected an int above 0, got 1.0"),
        ({"num_hidden_layers": "1"}, "num_hidden_layers: expected an int above 0, got '1'"),
        ({"num_hidden_layers": True}, "num_hidden_layers: expected an int above 0, got True"),
        ({"num_hidden_layers": None}, "num_hidden_layers: expected an int above 0, got None"),
        ({"num_hidden_layers": [1]}, "num_hidden_layers: expected an int above 0"),
        ({"vocab_size": 10**15}, "vocab_size: expected at most 2147483647"),
        ({"vocab_size": 10**400}, "vocab_size: expected at most 2147483647"),
        ({"vocab_size": 2**31 - 1}, "wrong shape: lm_head.weight"),
        ({"hidden_size": 2**31 - 1, "head_dim": None}, "is not a multiple of num_attention_heads"),
        ({"hidden_size": 2**31 - 4, "head_dim": None}, "head_dim: expected at most 65536"),
        ({"hidden_size": 2**31 - 1, "intermediate_size": 2**31 - 1, "head_dim": 8}, "wrong shape"),
        ({"hidden_size": -8}, "hidden_size: expected an int above 0, got -8"),
        ({"head_dim": 10**9}, "head_dim: expected at most 65536"),
        ({"head_dim": 3}, "head_dim: expected an even int"),
        ({"head_dim": {"a": 4}}, "head_dim: expected an even int"),
        ({"num_attention_heads": 2**30, "num_key_value_heads": 1, "head_dim": 8}, "2147483647 over all heads"),
        ({"num_key_value_heads": -1}, "num_key_value_heads: expected an int above 0, got -1"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings: expected at most"),
        ({"rope_theta": 1e300}, "rope_theta: expected a number"),
        ({"rope_theta": 1e-300}, "rope_theta: expected a number"),
        ({"rope_theta": 10**400}, "rope_theta: expected a number"),
        ({"rope_theta": "10000"}, "rope_theta: expected a number above 0, got '10000'"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps: expected a number above 0"),
        ({"rms_norm_eps": []}, "rms_norm_eps: expected a number above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
        ({"rope_scaling": [8.0]}, "rope parameters: expected an object"),
        ({"rope_scaling": {"rope_type": []}}, "rope_type []"),
        ({"rope_scaling": {"rope_type": 0}}, "rope_type 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "8"}}, "factor of rope_type 'linear'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e300}}, "factor of rope_type 'linear'"),
        ({"bos_token_id": 10**400}, "bos_token_id: expected at most"),
        ({"bos_token_id": [1]}, "bos_token_id: expected an int or None"),
        ({"model_type": ["llama"]}, "model_type: expected 'llama', got ['llama']"),
        ({"model_type": None}, "model_type: expected 'llama', got None"),
        ({"hidden_act": {"silu": 1}}, "hidden_act: expected 'silu' or 'swish'"),
        ({"hidden_act": "x" * 10**6}, "hidden_act: expected 'silu' or 'swish'"),
        ({"hidden_act": "\x1b[2J\n\ud800"}, r"hidden_act: expected 'silu' or 'swish', got '\x1b[2J\n\ud800'"),
    ],
)
def test_absurd_configurations(changes, words, one):
    directory, _ = one
    edit_config(directory, **changes)
    fails(directory, words)


@pytest.mark.parametrize("value", ["3", [[2]], {"2": 3}, {}, True, 2.0, -1, 2**31, 10**400, [2, None]])
def test_absurd_ids_that_stop(value, one):
    directory, _ = one
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    fails(directory, "eos_token_id: expected token ids")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty: {} (0 bytes)"),
        (b"\x00" * 50, "not JSON: {}"),
        (b'{"model_type": "lla\xffma"}', "not JSON: {}"),
        ('{"model_type": "llama"}'.encode("utf-16"), "not JSON: {}"),
        (b'{"rope_theta": NaN}', "not JSON: {}: expected numbers, got NaN"),
        (b'{"rope_theta": -Infinity}', "not JSON: {}: expected numbers, got -Infinity"),
        (b'{"a": 1, "vocab_size": 8, "vocab_size": 9}', "twice: vocab_size in {}"),
        (b'{"rope_scaling": {"factor": 2, "factor": 3}}', "twice: factor in {}"),
        (b'{"a": ' + DEEP.encode() + b"}", "not JSON: {}: expected at most 64 levels, got more"),
        (b'{"a": ' + b"[" * 70 + b"]" * 70 + b"}", "not JSON: {}: expected at most 64 levels, got more"),
        (b"1" * 5000, "not JSON: {}"),
        (b"[]", "{}: expected a JSON object, got list"),
        (POINTER, "git-lfs pointer: {} only names contents of 2,471,645,608 bytes: run `git lfs pull`"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_are_no_json(name, content, words, one):
    directory, _ = one
    (directory / name).write_bytes(content)
    fails(directory, words.format(name))


def test_a_byte_order_mark_is_passed_over(one):
    directory, _ = one
    path = directory / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    load(directory)


NAMES = ("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["directory", "FIFO", "link to nothing", "link to itself", "socket"])
def test_what_is_no_file_is_named_and_never_waited_for(kind, name, one):
    directory, tensors = one
    path = directory / name
    if "index" in name:
        write_shards(directory, tensors)
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    else:
        path.symlink_to(path if "itself" in kind else "nowhere")
    expected = {"link to nothing": f"absent: {name} is a link to nothing", "link to itself": f"cannot be read: {name}"}
    fails(directory, expected.get(kind, f"not a file: {name} is a {kind}"))


def test_a_shard_may_be_a_link_as_in_the_hubs_cache(one):
    directory, tensors = one
    for shard in write_shards(directory, tensors):
        blob = directory.parent / f"blob-{shard}"
        (directory / shard).rename(blob)
        (directory / shard).symlink_to(blob)
    load(directory)


def test_an_unreadable_file_is_named(one, monkeypatch):
    directory, _ = one
    from pathlib import Path

    plain = Path.open

    def refuse(self, *args, **kwargs):
        if self.name == "model.safetensors":
            raise PermissionError(13, "Permission denied")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    fails(directory, "cannot be read: model.safetensors: Permission denied")


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "a/b", "", ".", "..", "a\x00b", "a\\b", 3, None]
)
def test_an_index_does_not_leave_its_directory(shard, one):
    directory, tensors = one
    write_shards(directory, tensors)
    index = directory / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = shard
    index.write_text(json.dumps(content))
    fails(directory, "wrong index: model.safetensors.index.json: model.norm.weight: expected a file name")


@pytest.mark.parametrize("shard", ["x" * 300, "\ud800", "config.json", "model.safetensors.index.json"])
def test_an_index_names_files_that_are_none_of_safetensors(shard, one):
    directory, tensors = one
    write_shards(directory, tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
    fails(directory, "model.norm.weight")


def test_shards_that_are_pointers_are_named_with_their_size(one):
    directory, tensors = one
    for shard in write_shards(directory, tensors, count=2):
        (directory / shard).write_bytes(POINTER)
    lines = fails(directory, "git-lfs pointer: model-00001-of-00002.safetensors only names contents of 2,471,645,608")
    assert len(lines) == 2


def test_an_index_of_many_files_takes_linear_time(one):
    directory, _ = one
    (directory / "model.safetensors").unlink()
    placed = {f"tensor.{n}": f"shard-{n}" for n in range(3_000)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    assert len(fails(directory, "absent: shard-2999")) == 3_000


def rewrite_header(directory, change, body=None):
    """``change`` edits the parsed header, or returns its text."""
    path = directory / "model.safetensors"
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    text = (change(header) or json.dumps(header)).encode("utf-8", "surrogatepass")
    path.write_bytes(len(text).to_bytes(8, "little") + text + (data[8 + size :] if body is None else body))


def set_entry(**changes):
    return lambda header: header["model.norm.weight"].update(changes)


@pytest.mark.parametrize(
    "change",
    [
        set_entry(data_offsets=[0, 2**64]),
        set_entry(data_offsets=[-32, 0]),
        set_entry(data_offsets=[32, 0]),
        set_entry(data_offsets=[0.0, 32.0]),
        set_entry(data_offsets=[0, 32, 64]),
        set_entry(data_offsets="0,32"),
        set_entry(data_offsets=[0, 32]),
        set_entry(data_offsets=[10**9, 10**9 + 32]),
        set_entry(data_offsets=[10**400, 10**400 + 32]),
        set_entry(shape=[2**32, 2**32, 8]),
        set_entry(shape=[2**62, 2**62]),
        set_entry(shape=[1] * 5000 + [8]),
        set_entry(shape=[0]),
        set_entry(shape=[-8]),
        set_entry(shape=[8.0]),
        set_entry(shape=8),
        set_entry(shape=[7]),
        set_entry(shape=None),
        set_entry(dtype="F64"),
        set_entry(dtype="F16"),
        set_entry(dtype="F8_E4M3"),
        set_entry(dtype="X"),
        set_entry(dtype=["F32"]),
        lambda header: header.update(a=1),
        lambda header: header.update(__metadata__=[1]),
        lambda header: header.update(__metadata__={"a": {"b": 1}}),
        lambda header: header.pop("model.norm.weight") and None,
        lambda header: header.clear(),
        lambda header: "[]",
        lambda header: " ",
        lambda header: "{",
        lambda header: '{"a": NaN}',
        lambda header: DEEP,
        lambda header: "\ufeff" + json.dumps(header),
        lambda header: "\ud800" + json.dumps(header),
        lambda header: header.update({"x" * 10**5: header["model.norm.weight"]}),
        lambda header: header.update({"\n\x1b[2J": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}),
    ],
)
def test_headers_that_lie(change, one):
    directory, _ = one
    rewrite_header(directory, change)
    lines = fails(directory, "model.safetensors")
    assert all(line.isprintable() and len(line) < 3000 for line in lines)


@pytest.mark.parametrize("size", [0, 1, 2**31, 2**63, 2**64 - 1, 100_000_001])
def test_a_length_of_the_header_that_lies(size, one):
    directory, _ = one
    path = directory / "model.safetensors"
    path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])
    fails(directory, "truncated or altered: model.safetensors")


def test_a_small_file_allocates_little(one):
    """Headers and configurations that promise terabytes."""
    directory, _ = one
    size = 2**31 - 8
    cases = [
        {"hidden_size": size, "intermediate_size": size, "vocab_size": size, "head_dim": 65536},
        {"max_position_embeddings": size},
        {"num_hidden_layers": 2**31 - 1},
    ]
    for changes in cases:
        edit_config(directory, **changes)
        loads_or_fails(directory)  # compiled and imported what there is
        assert peak_memory(loads_or_fails, directory) < 5e6


def test_damaged_directories_load_or_fail(one):
    """Flipped bytes, cut files and swapped JSON values, in every file of a directory and of its shards."""
    directory, tensors = one
    rng = random.Random(0)
    refused = 0
    for sharded in (False, True):
        if sharded:
            write_shards(directory, tensors, count=2)
        whole = {path: path.read_bytes() for path in directory.iterdir()}
        for case in range(150):
            path = rng.choice(sorted(whole))
            data = whole[path]
            if path.suffix == ".json" and case % 3:
                data = mutate_json(rng, data)
            elif path.suffix == ".json":
                data = flip(rng, data, len(data))
            elif case % 3 == 0:
                data = truncate(rng, data)
            elif case % 3 == 1:
                data = flip(rng, data, 8 + int.from_bytes(data[:8], "little"))
            else:
                text = mutate_json(rng, data[8 : 8 + int.from_bytes(data[:8], "little")])
                data = len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]
            path.write_bytes(data)
            refused += loads_or_fails(directory)
            path.write_bytes(whole[path])
    assert refused > 150


def test_nothing_is_written(one, tmp_path):
    directory, tensors = one
    write_shards(directory, tensors)
    (directory / "config.json").write_text("{")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    fails(directory, "not JSON: config.json")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
