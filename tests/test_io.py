"""Saving and loading again, and what a source may be."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_arrays, model_config, random_model, write_plain, write_shards
from support import LLAMA3_ROPE

import lsjax
from lsjax.convert import flax
from lsjax.convert.checkpoint import CheckpointError
from lsjax.io import convert, is_written, load, save
from lsjax.params import abstract_tree
from lsjax.sources import locate

CONFIGS = {
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 2, "eos_token_id": (), "bos_token_id": None},
    "llama3, biases": {"attention_bias": True, "mlp_bias": True, "head_dim": 20, "rope_scaling": LLAMA3_ROPE},
    "linear, several ends": {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_theta": 500.5,
        "eos_token_id": (7, 3),
        "pad_token_id": 9,
        "rms_norm_eps": 1e-5,
    },
}


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def cast(params: lsjax.Params, dtype) -> lsjax.Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("config", CONFIGS)
def test_what_is_saved_loads_bit_for_bit(config, dtype, tmp_path):
    params = cast(random_model(5, **CONFIGS[config]), dtype)
    save(params, tmp_path / "new" / "model")
    loaded = load(tmp_path / "new" / "model")
    assert loaded.config == params.config
    assert_same_arrays(loaded, params)
    assert listing(tmp_path / "new") == ["model"]
    assert load(tmp_path / "new" / "model", "bfloat16").dtype == ml_dtypes.bfloat16


def test_mixed_dtypes_and_special_numbers_are_kept(small, tmp_path):
    tree = jax.tree.map(lambda leaf: leaf, small.tree)
    bits = np.arange(small.config.hidden_size, dtype=np.uint16) * 1365  # NaNs, infinities, denormals, -0.0 among them
    bits[:4] = 0x7FC1, 0xFF80, 0x0001, 0x8000
    tree["norm"]["scale"] = jax.device_put(bits.view(ml_dtypes.bfloat16))
    save(lsjax.Params(small.config, tree), tmp_path)
    loaded = load(tmp_path)
    np.testing.assert_array_equal(np.asarray(loaded.tree["norm"]["scale"]).view(np.uint16), bits)
    assert loaded.dtype == "float32"


def test_hugging_face_layout_is_what_convert_makes_of_ours(small, tmp_path):
    from safetensors.numpy import load_file

    save(small, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "converted", to="hf")
    save(small, tmp_path / "theirs", to="hf")
    assert listing(tmp_path / "theirs") == ["config.json", "generation_config.json", "model.safetensors"]
    assert_same_arrays(load(tmp_path / "theirs"), small)
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "converted"))
    assert found.keys() == expected.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)
    save(small, tmp_path / "theirs")  # written by us, so it may be replaced
    assert listing(tmp_path / "theirs") == ["config.json", "generation_config.json", "params.safetensors"]
    with pytest.raises(ValueError, match="to: expected 'flax' or 'hf', got 'gguf'"):
        save(small, tmp_path / "theirs", to="gguf")  # pyright: ignore[reportArgumentType]


def test_large_models_are_saved_in_shards(small, tmp_path):
    flax.write(small, tmp_path, shard_bytes=40_000)
    files = list(tmp_path.glob("params-*-of-*.safetensors"))
    assert len(files) > 2
    assert max(path.stat().st_size for path in files) < 45_000
    assert_same_arrays(load(tmp_path), small)
    assert is_written(tmp_path)
    next(iter(files)).unlink()
    with pytest.raises(CheckpointError, match=r"absent: params-0000"):
        load(tmp_path)


def test_transformers_reads_the_saved_configuration(tmp_path):
    import transformers

    config = model_config(**CONFIGS["linear, several ends"])
    save(lsjax.init(config, jax.random.key(0), "bfloat16"), tmp_path)
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dtype"] == "bfloat16"
    assert lsjax.LlamaConfig.from_dict(read.to_dict()) == config
    generation = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert (generation.eos_token_id, generation.pad_token_id, generation.bos_token_id) == ([7, 3], 9, 1)


def test_save_replaces_what_it_wrote_and_nothing_else(small, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    save(small, target)  # empty
    other = jax.tree.map(lambda leaf: leaf * 2, small)
    save(other, target)
    assert_same_arrays(load(target), other)
    (target / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(FileExistsError, match=r"did not write.*notes\.txt"):
        save(small, target)
    with pytest.raises(FileExistsError, match="expected a directory, got a file"):
        save(small, target / "notes.txt")
    assert {path: path.read_bytes() for path in target.iterdir()} == before
    write_plain(tmp_path / "theirs", small)
    with pytest.raises(FileExistsError, match=r"did not write.*model\.safetensors"):
        save(small, tmp_path / "theirs")
    assert listing(tmp_path) == ["model", "theirs"]


@pytest.mark.parametrize("where", ["write_config", "write_weights"])
def test_a_save_that_fails_leaves_what_was_there(where, small, tmp_path, monkeypatch):
    save(small, tmp_path / "model")

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(flax, where, fail)
    for name in ("model", "new"):
        with pytest.raises(OSError, match="no space left"):
            save(jax.tree.map(lambda leaf: leaf * 2, small), tmp_path / name)
    assert listing(tmp_path) == ["model"]
    assert_same_arrays(load(tmp_path / "model"), small)


def test_save_refuses_what_has_no_numbers(small, tmp_path):
    with pytest.raises(ValueError, match="expected concrete arrays"):
        save(lsjax.Params(small.config, abstract_tree(small.config)), tmp_path / "model")
    with pytest.raises(ValueError, match=r"expected lsjax\.Params, got dict"):
        save(small.tree, tmp_path / "model")
    with pytest.raises(ValueError, match="expected concrete arrays"):
        jax.jit(lambda params: save(params, tmp_path / "model"))(small)
    assert listing(tmp_path) == []


def test_an_index_decides_which_files_hold_the_model(small, tmp_path):
    tensors = write_plain(tmp_path, small)
    single = tmp_path / "model.safetensors"
    stale = single.read_bytes()[:-1]
    parts = write_shards(tmp_path, tensors)
    single.write_bytes(stale)  # beside the index, which does not name it
    assert_same_arrays(load(tmp_path), small)
    (tmp_path / next(iter(parts))).unlink()
    with pytest.raises(CheckpointError, match=r"absent: model-00001-of-00003\.safetensors"):
        load(tmp_path)
    write_plain(tmp_path, small)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))
    assert_same_arrays(load(tmp_path), small)
    index.unlink()
    assert_same_arrays(load(tmp_path), small)


def test_two_checkpoints_in_one_directory_are_refused(small, tmp_path):
    save(small, tmp_path)
    write_plain(tmp_path, small)
    with pytest.raises(CheckpointError, match=r"got 2: model\.safetensors and params\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    "source", ["./nowhere", "/no/where", "nowhere", "a/b/c", "~/no-such-model", "a/b.gguf", Path("a/b")]
)
def test_a_mistyped_path_says_so(source):
    with pytest.raises(FileNotFoundError, match="there is no such file or directory, and a hub id has the form"):
        load(source)


def test_a_file_that_is_no_gguf_is_refused_by_its_name(small, tmp_path):
    write_plain(tmp_path, small)
    with pytest.raises(ValueError, match="give the directory that holds this file"):
        load(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="revision: only a hub id has revisions"):
        load(tmp_path, revision="main")


def test_a_home_relative_path_is_expanded(tmp_path, monkeypatch, small):
    monkeypatch.setenv("HOME", str(tmp_path))
    save(small, "~/model")
    assert locate("~/model") == tmp_path / "model"
    assert_same_arrays(load("~/model"), small)


def test_progress_is_shown_when_asked_for_and_otherwise_only_on_a_terminal(small, tmp_path, capfd):
    save(small, tmp_path)
    load(tmp_path)
    load(tmp_path, progress=False)
    assert capfd.readouterr() == ("", "")
    load(tmp_path, progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "Loading" in err
