"""Inspection: what headers say, whatever is wrong with them, and never a weight."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    gguf_metadata,
    gguf_tensors,
    model_config,
    random_model,
    write_config,
    write_gguf,
    write_plain,
    write_shards,
    write_sparse,
)
from safetensors.numpy import save_file

import lsjax.cli
from lsjax.convert import gguf, shards
from lsjax.io import convert, inspect, save


@pytest.fixture
def no_data(monkeypatch):
    """Reading a weight is an error."""

    def read_array(*_):
        raise AssertionError("a weight was read")

    for module in (shards, gguf):
        monkeypatch.setattr(module, "read_array", read_array)


@pytest.fixture
def show(capsys):
    """Calls ``lsjax inspect``: exit status and the lines of standard output."""

    def call(*arguments) -> tuple[int, list[str]]:
        status = lsjax.cli.main(["inspect", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert not err
        return status, out.splitlines()

    return call


def test_a_sound_checkpoint(checkpoint, small, no_data, show):
    directory, tensors = checkpoint
    (directory / "tokenizer.json").write_text("{}")
    found = inspect(directory)
    assert (found.loads, found.problems, found.notes) == (True, (), ())
    assert (found.format, found.family) == ("safetensors", "llama")
    assert found.num_parameters == small.num_parameters
    assert found.num_bytes == small.num_bytes
    assert found.dtypes == {"F32": len(tensors)}
    assert {tensor.name: tensor.shape for tensor in found.tensors} == {name: v.shape for name, v in tensors.items()}
    assert found.files == {path.name: path.stat().st_size for path in directory.iterdir()}
    status, lines = show(directory)
    assert status == 0
    assert lines[0] == f"{directory}: llama, safetensors"
    assert lines[1].startswith(f"{small.num_parameters:,} parameters, 193 kB in 21 tensors (21 F32)")
    text = "\n".join(lines)
    for part in ("num_hidden_layers 2", "num_key_value_heads 2", "tie_word_embeddings false", "eos_token_id 2"):
        assert part in text
    assert [line.split() for line in lines if "up_proj" in line] == [
        ["model.layers.{0-1}.mlp.up_proj.weight", "[80,", "48]", "F32"]
    ]
    assert lines[-1] == "lsjax loads it, as far as its headers tell."
    assert len(lines) <= 40
    status, lines = show(directory, "--all")
    assert len([line for line in lines if line.startswith("model.layers.")]) == 18
    report = json.loads("".join(show(directory, "--json")[1]))
    assert report["loads"] is True
    assert report["config"]["hidden_size"] == 48
    name = "model.layers.1.mlp.up_proj.weight"
    shape = {"name": name, "shape": [80, 48], "dtype": "F32", "bytes": 15360, "file": "model.safetensors"}
    assert shape in report["tensors"]


def test_a_checkpoint_of_real_size(tmp_path, no_data, show):
    write_sparse(tmp_path, num_hidden_layers=20, hidden_size=16384, intermediate_size=53248)
    found = inspect(tmp_path)
    assert found.loads
    assert found.num_parameters > 60e9
    status, lines = show(tmp_path)
    assert status == 0
    assert len(lines) <= 40
    assert any("model.layers.{0-19}.mlp.up_proj.weight" in line for line in lines)
    assert any(
        "model-00001-of-00008.safetensors ... model-00008-of-00008.safetensors (8 files)" in line for line in lines
    )
    shutil.rmtree(tmp_path)


def test_what_lsjax_writes_and_gguf(small, tmp_path, no_data, monkeypatch):
    pytest.importorskip("gguf")
    save(small, tmp_path / "saved")
    found = inspect(tmp_path / "saved")
    assert (found.format, found.family, found.loads) == ("lsjax", "llama", True)
    assert found.num_parameters == small.num_parameters
    params = random_model(3, hidden_size=64, intermediate_size=96, num_attention_heads=4)
    tensors = gguf_tensors(params)
    kinds = {name: "Q4_1" for name, value in tensors.items() if value.ndim == 2}
    write_gguf(tmp_path / "m.gguf", gguf_metadata(params.config), tensors, kinds)
    found = inspect(tmp_path / "m.gguf")
    assert (found.format, found.family, found.loads) == ("gguf", "llama", True)
    assert found.num_parameters == params.num_parameters
    assert found.dtypes == {"Q4_1": len(kinds), "F32": len(tensors) - len(kinds)}
    matrices = sum(tensors[name].size for name in kinds)
    assert found.num_bytes == matrices * 20 // 32 + 4 * (params.num_parameters - matrices)
    assert "no tokenizer: prompts have to be given as token ids" in found.notes
    write_gguf(tmp_path / "m.gguf", gguf_metadata(params.config, **{"general.architecture": "qwen2"}), tensors)
    found = inspect(tmp_path / "m.gguf")
    assert (found.family, found.loads) == ("qwen2", False)
    assert len(found.tensors) == len(tensors)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert "not GGUF" in inspect(tmp_path / "m.gguf").problems[0]


def test_bin_files(small, tmp_path):
    torch = pytest.importorskip("torch")
    tensors = write_plain(tmp_path, small)
    (tmp_path / "model.safetensors").unlink()
    state = {name: torch.tensor(value).bfloat16() for name, value in tensors.items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    found = inspect(tmp_path)
    assert (found.format, found.loads, found.dtypes) == ("pytorch", True, {"BF16": len(tensors)})
    assert (found.num_parameters, found.num_bytes) == (small.num_parameters, 2 * small.num_parameters)


def test_what_is_odd_is_noted(tmp_path, no_data):
    params = random_model(5, tie_word_embeddings=True, num_hidden_layers=2, eos_token_id=())
    tensors = write_plain(tmp_path, params, torch_dtype="float16")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(ml_dtypes.bfloat16)
    single = (tmp_path / "model.safetensors").read_bytes()
    write_shards(tmp_path, tensors)
    (tmp_path / "model.safetensors").write_bytes(single)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    found = inspect(tmp_path)
    assert found.loads
    assert found.num_parameters == params.num_parameters
    assert list(found.notes) == [
        "mixed dtypes: BF16, F32; without --dtype each tensor keeps its own",
        "config.json says float16, but the tensors are bfloat16 and float32",
        "lm_head.weight is stored too, although the head is tied; loading compares it with the embedding",
        "ignored, since they are recomputed: rotary buffers model.layers.0.self_attn.rotary_emb.inv_freq and 1 more",
        "no eos_token_id: generation ends at its limit only",
        "no tokenizer: prompts have to be given as token ids",
        "model.safetensors is ignored: model.safetensors.index.json decides, and does not name it",
        "other weights beside it, ignored: pytorch_model.bin",
    ]


def test_what_is_wrong_is_told_and_the_status_is_1(checkpoint, show, no_data):
    directory, tensors = checkpoint
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((80, 47), np.float32)
    tensors["extra"] = np.ones(3, np.int32)
    parts = write_shards(directory, tensors, count=2)
    status, lines = show(directory)
    problems = sorted(line for line in lines if line.startswith("problem: "))
    assert status == 1
    where = next(file for file, names in parts.items() if "extra" in names)
    assert problems == [
        "problem: missing: model.layers.1.mlp.up_proj.weight [80, 48]",
        f"problem: unexpected: extra [3] in {where}",
        "problem: wrong shape: model.layers.0.mlp.up_proj.weight in "
        f"{next(file for file, names in parts.items() if 'model.layers.0.mlp.up_proj.weight' in names)}: "
        "expected [80, 48], got [80, 47]",
    ]
    assert lines[-1] == "lsjax does not load it."
    report = json.loads("".join(show(directory, "--json")[1]))
    assert sorted(f"problem: {line}" for line in report["problems"]) == problems


@pytest.mark.parametrize(
    ("content", "problem", "family"),
    [
        ("{", "not JSON", None),
        (json.dumps({"model_type": "mistral", "hidden_size": 48, "sliding_window": 4096}), "got 'mistral'", "mistral"),
        (json.dumps({"model_type": "llama", "hidden_size": 48}), "lacks vocab_size", "llama"),
    ],
)
def test_a_broken_or_foreign_config_hides_nothing_else(content, problem, family, checkpoint, show, no_data):
    directory, tensors = checkpoint
    (directory / "config.json").write_text(content)
    found = inspect(directory)
    assert not found.loads
    assert any(problem in line for line in found.problems)
    assert found.family == family
    assert found.config == ({"hidden_size": 48} if family else {})
    assert len(found.tensors) == len(tensors)
    status, lines = show(directory)
    assert status == 1
    assert any(line.startswith("model.layers.{0-1}.mlp.up_proj.weight") for line in lines)


def test_an_empty_directory_and_no_directory(tmp_path, show, capsys, small):
    write_config(tmp_path, model_config())
    found = inspect(tmp_path)
    assert (found.format, found.family, found.tensors) == (None, "llama", ())
    assert found.config["num_hidden_layers"] == 3
    assert "expected model.safetensors" in found.problems[0]
    save(small, tmp_path / "params")
    write_plain(tmp_path / "params", small)
    assert show(tmp_path / "params")[0] == 1
    assert lsjax.cli.main(["inspect", str(tmp_path / "nowhere")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_many_problems_are_cut(checkpoint, show):
    directory, tensors = checkpoint
    save_file({f"t{index}": np.ones(1, np.float32) for index in range(50)}, directory / "model.safetensors")
    _, lines = show(directory)
    assert len([line for line in lines if line.startswith("problem: ")]) == 20
    assert f"and {50 + len(tensors) - 20} problems more (--json lists all)" in lines
    convert_status = lsjax.cli.main(["convert", str(directory), str(directory.parent / "out")])
    assert convert_status == 2
    assert not (directory.parent / "out").exists()
    with pytest.raises(ValueError, match="unexpected: t49"):
        convert(directory, directory.parent / "out")


@pytest.mark.parametrize("family", ["\x1b[31mRED\nlsjax loads it", "\ud800", ["llama"]])
def test_what_a_file_says_cannot_reach_the_terminal_raw(family, checkpoint, capsys):
    directory, tensors = checkpoint
    save_file(tensors | {"evil\x1b[2J": np.ones(3, np.float32)}, directory / "model.safetensors")
    write_config(directory, model_config(), model_type=family)
    for options in ([], ["--all"], ["--json"]):
        assert lsjax.cli.main(["inspect", str(directory), *options]) == 1
        out = capsys.readouterr().out
        assert out.isascii()
        assert all(line.isprintable() for line in out.splitlines())
        assert "lsjax loads it" not in out.splitlines()
