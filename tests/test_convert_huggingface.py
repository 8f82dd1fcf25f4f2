"""Directories in Hugging Face layout, written by transformers and by plain NumPy, and read by lsjax."""

import json
import math
import shutil
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import SMALL, assert_same_arrays, model_config, random_model, write_sparse
from safetensors.numpy import save_file
from support import LLAMA3_ROPE, transformers_model

import lsjax
from lsjax.convert.assemble import assemble
from lsjax.convert.checkpoint import Checkpoint, Listing, Stored
from lsjax.convert.formats import open_checkpoint
from lsjax.convert.names import FLAX, GGUF, HUGGINGFACE, source_shape
from lsjax.io import load
from lsjax.params import abstract_tree, flatten

VARIANTS = {
    "tied, grouped keys": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "untied, all biases": {"attention_bias": True, "mlp_bias": True},
    "explicit head_dim, llama3": {"head_dim": 20, "num_key_value_heads": 3, "rope_scaling": LLAMA3_ROPE},
    "linear rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 500.0},
}
TOKENS = np.random.default_rng(1).integers(0, SMALL["vocab_size"], (2, 64))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
def test_what_transformers_saves_loads_to_the_same_weights_and_logits(variant, sharded, tmp_path):
    torch = pytest.importorskip("torch")
    params = random_model(7, **VARIANTS[variant])
    model = transformers_model(params)
    model.save_pretrained(tmp_path, max_shard_size="30KB" if sharded else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 3) == sharded
    loaded = load(tmp_path)
    assert loaded.config == params.config
    assert_same_arrays(loaded, params)
    with torch.no_grad():
        expected = model(torch.tensor(TOKENS)).logits.numpy()
    assert expected.std() >= 1
    np.testing.assert_allclose(lsjax.forward(loaded, TOKENS), expected, atol=1e-4 * expected.std(), rtol=0)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_half_precision_storage_is_bit_exact_and_casts_as_torch_does(stored, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    params = random_model(8, **VARIANTS["untied, all biases"])
    model = transformers_model(params)
    full = {name: value.clone() for name, value in model.state_dict().items()}
    model.to(getattr(torch, stored)).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(loaded)} == {stored}
    for path, leaf in flatten(loaded.tree).items():
        name, transform = HUGGINGFACE.from_flax(path)
        bits = model.state_dict()[name].view(torch.int16).numpy()
        np.testing.assert_array_equal(np.asarray(leaf).view(np.int16), bits if transform == "keep" else bits.T)
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        expected = again(torch.tensor(TOKENS)).logits.numpy()
    found = lsjax.forward(load(tmp_path, "float32"), TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-4 * expected.std(), rtol=0)
    model.float().load_state_dict(full)
    model.save_pretrained(tmp_path)
    assert_same_arrays(load(tmp_path, stored), loaded)  # float32 rounded by lsjax, and by torch


def test_configs_of_transformers_4_and_5_load_to_the_same_model(tmp_path):
    pytest.importorskip("torch")
    params = random_model(9, **VARIANTS["explicit head_dim, llama3"])
    transformers_model(params).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    rope = dict(written.pop("rope_parameters"))  # transformers 5
    old = {**written, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "torch_dtype": written.pop("dtype")}
    new = load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert load(tmp_path).config == new.config == params.config
    (tmp_path / "config.json").write_text(json.dumps({**old, "rope_scaling": {**rope, "factor": 2.0}}))
    assert load(tmp_path).config != params.config


def test_special_ids_of_the_generation_config_win(checkpoint):
    directory, _ = checkpoint
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9], "pad_token_id": 7}))
    config = load(directory).config
    assert (config.eos_token_id, config.pad_token_id, config.bos_token_id) == ((5, 9), 7, 1)


def test_every_tensor_has_a_row_in_every_table():
    config = model_config(attention_bias=True, mlp_bias=True, num_hidden_layers=11)
    for table in (HUGGINGFACE, GGUF, FLAX):
        names = set()
        for path in flatten(abstract_tree(config)):
            name, transform = table.from_flax(path)
            assert table.to_flax(name) == (path, transform)
            names.add(name)
        assert len(names) == len(flatten(abstract_tree(config)))
        assert table.to_flax("model.layers.01.mlp.up_proj.weight") is None
        assert table.to_flax("model.layers.x.mlp.up_proj.weight") is None
    assert source_shape("transpose", (2, 3)) == (3, 2)


def test_rotary_buffers_of_old_checkpoints_are_passed_over(checkpoint, small):
    directory, tensors = checkpoint
    tensors["model.layers.1.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, directory / "model.safetensors")
    assert_same_arrays(load(directory), small)


def test_float64_is_read_as_jax_holds_it(checkpoint, small):
    directory, tensors = checkpoint
    save_file({name: value.astype(np.float64) for name, value in tensors.items()}, directory / "model.safetensors")
    assert_same_arrays(load(directory), small)


def test_mixed_dtypes_stay_as_stored_and_a_given_dtype_is_for_all(checkpoint):
    directory, tensors = checkpoint
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(ml_dtypes.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    loaded = load(directory)
    assert loaded.tree["norm"]["scale"].dtype == "bfloat16"
    assert loaded.dtype == "float32"
    for dtype in ("bfloat16", np.float16, jax.numpy.bfloat16, np.dtype("float32")):
        assert {leaf.dtype for leaf in jax.tree.leaves(load(directory, dtype))} == {jax.numpy.dtype(dtype)}


def test_one_tensor_at_a_time_is_in_memory(monkeypatch):
    config = model_config(num_hidden_layers=2)
    read_before, alive = [], []

    def read(shape):
        alive.append(sum(reference() is not None for reference in read_before))
        array = np.zeros(shape, np.float32)
        read_before.append(weakref.ref(array))
        return array

    def put(array, may_alias):
        assert not may_alias
        read_before.append(weakref.ref(array))
        return jnp.zeros(array.shape, array.dtype)

    monkeypatch.setattr(jax, "device_put", put)
    stored = []
    for path, leaf in flatten(abstract_tree(config)).items():
        name, transform = HUGGINGFACE.from_flax(path)
        shape = source_shape(transform, leaf.shape)
        stored.append(Stored(name, shape, "F32", "file", lambda shape=shape: read(shape)))
    assemble(Checkpoint(Path("x"), "safetensors", HUGGINGFACE, Listing(tuple(stored)), config))
    assert alive == [0] * len(stored)
    assert len(read_before) == 2 * len(stored)


def test_what_is_loaded_does_not_change_with_its_file(checkpoint, small):
    directory, _ = checkpoint
    loaded = load(directory)
    path = directory / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\0" * 4096)
    assert_same_arrays(loaded, small)


def test_listing_a_checkpoint_of_real_size_is_quick(tmp_path):
    """80 layers in 8 shards, without data: headers of sparse files."""
    placed = write_sparse(tmp_path)
    listing = open_checkpoint(tmp_path).listing
    assert not listing.problems
    assert {tensor.name: tensor.where for tensor in listing.tensors} == placed
    assert sum(math.prod(tensor.shape) for tensor in listing.tensors) > 60e9
    shutil.rmtree(tmp_path)
