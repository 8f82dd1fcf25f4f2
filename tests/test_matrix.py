"""Whatever a checkpoint is: transformers' logits from the same files, and its weights, bit for bit there and back."""

import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import matrix
import numpy as np
import pytest
from checkpoints import assert_same_arrays, gguf_metadata, gguf_tensors, write_gguf
from huggingface_hub import constants
from safetensors.numpy import save_file
from support import quickly_compiled, random_params, transformers_model

import lsjax
from lsjax.io import convert, load, save
from lsjax.params import flatten, unflatten

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKENS = np.random.default_rng(1).integers(0, 131, (2, 24))
CASES = matrix.covering_cases()
forward = quickly_compiled(lsjax.forward)


@functools.cache
def model(head: str, biases: str, head_dim: str) -> lsjax.Params:
    config = lsjax.LlamaConfig(
        vocab_size=131,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=24 if head_dim == "explicit head_dim" else 0,
        max_position_embeddings=256,
        rms_norm_eps=1e-3,
        rope_theta=1000.0,
        tie_word_embeddings=head == "tied",
        attention_bias=biases != "no biases",
        mlp_bias=biases == "attention and MLP biases",
    )
    params = random_params(config, seed=1)
    params.tree["norm"]["scale"] *= 2  # logits that deviate by about 2
    return params


def write_config(directory, config: lsjax.LlamaConfig, version: str, dtype: str) -> None:
    """``config.json`` as transformers 4 or 5 writes it."""
    entries = {**config.to_dict(), "attention_dropout": 0.0, "pretraining_tp": 1, "use_cache": True}
    if version == "v4 config":
        entries |= {"rope_scaling": None, "torch_dtype": dtype, "transformers_version": "4.45.2"}
    else:
        rope = {"rope_type": "default", "rope_theta": entries.pop("rope_theta")}
        entries |= {"rope_parameters": rope, "dtype": dtype, "transformers_version": "5.1.0"}
    (directory / "config.json").write_text(json.dumps(entries))


def write_weights(directory, tensors: dict, source: str) -> None:
    """One file, or three and their index."""
    torch = pytest.importorskip("torch")
    is_torch = source.startswith("PyTorch")
    stem, ending = ("pytorch_model", "bin") if is_torch else ("model", "safetensors")

    def write(held: dict, name: str) -> None:
        if is_torch:
            integers = {2: np.int16, 4: np.int32}
            torch.save(
                {
                    key: torch.tensor(value.view(integers[value.itemsize])).view(getattr(torch, value.dtype.name))
                    for key, value in held.items()
                },
                directory / name,
            )
        else:
            save_file(held, directory / name, metadata={"format": "pt"})

    if "one file" in source:
        write(tensors, f"{stem}.{ending}")
        return
    names, placed = sorted(tensors), {}
    for number in range(3):
        part = f"{stem}-{number + 1:05}-of-00003.{ending}"
        write({name: tensors[name] for name in names[number::3]}, part)
        placed |= dict.fromkeys(names[number::3], part)
    (directory / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def put_into_hub_cache(directory, home) -> None:
    """Moves a directory to where the hub's client keeps ``some/model``: links to blobs."""
    repository = home / "models--some--model"
    snapshot, blobs = repository / "snapshots" / SHA, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(SHA)
    for path in list(directory.iterdir()):
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(os.path.relpath(blobs / path.name, snapshot))
    directory.rmdir()
    directory.symlink_to(snapshot)


def named(params: lsjax.Params) -> dict:
    """The weights under transformers' names, in its layouts."""
    tensors = {}
    for path, leaf in flatten(params.tree).items():
        *modules, kind = path.replace("layers_", "layers.").split("/")
        name = ".".join(modules) + (".bias" if kind == "bias" else ".weight")
        value = np.asarray(leaf)
        tensors[name if modules[0] == "lm_head" else f"model.{name}"] = np.ascontiguousarray(
            value.T if kind == "kernel" else value
        )
    return tensors


def write_case(case: matrix.Case, directory: Path) -> tuple[Path, lsjax.Params]:
    """Writes the checkpoint of a case; returns what ``load`` takes, and the weights as they are stored."""
    params = model(*matrix.model_of(case))
    directory.mkdir()
    if case.source == "GGUF":
        return write_gguf_case(params, case.stored, directory)
    stored = jax.tree.map(lambda leaf: leaf.astype(case.stored), params)
    if case.source == "lsjax.save":
        save(stored, directory)
        return directory, stored
    write_weights(directory, named(stored), case.source)
    write_config(directory, params.config, case.config, case.stored)
    return directory, stored


def write_gguf_case(params: lsjax.Params, stored: str, directory: Path) -> tuple[Path, lsjax.Params]:
    """Matrices in the type of the case, the rest in float32, as llama.cpp writes them."""
    gguf = pytest.importorskip("gguf")
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(stored, stored)
    quant = gguf.GGMLQuantizationType[kind]
    tensors = gguf_tensors(params)
    kinds = {} if kind == "F32" else {name: kind for name, value in tensors.items() if value.ndim == 2}
    write_gguf(directory / "model.gguf", gguf_metadata(params.config), tensors, kinds)

    def rounded(path: str, leaf: jax.Array) -> jax.Array:
        if kind == "F32" or leaf.ndim < 2:
            return leaf
        rows = np.ascontiguousarray(np.asarray(leaf).T if path.endswith("kernel") else np.asarray(leaf))
        values = gguf.dequantize(gguf.quantize(rows, quant), quant).astype(np.float32)  # row by row, in any order
        return jnp.asarray(values.T if path.endswith("kernel") else values)

    tree = unflatten({path: rounded(path, leaf) for path, leaf in flatten(params.tree).items()})
    return directory / "model.gguf", lsjax.Params(params.config, tree)


def logits_of_transformers(case: matrix.Case, directory, stored: lsjax.Params) -> np.ndarray:
    """What transformers computes in float32 from the same files."""
    import torch
    import transformers

    if case.source == "GGUF" and case.biases != "no biases":
        reference = transformers_model(stored)  # its reader of GGUF leaves a Llama's biases out
    elif case.source == "GGUF":
        reference = transformers.LlamaForCausalLM.from_pretrained(
            directory, gguf_file="model.gguf", dtype=torch.float32, attn_implementation="eager"
        )
    else:
        reference = transformers.LlamaForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        )
    with torch.no_grad():
        return reference.eval()(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.filterwarnings("ignore:no tokenizer is written")  # these GGUF files have none
@pytest.mark.parametrize("case", CASES, ids=lambda case: " - ".join(case))
def test_a_checkpoint_gives_transformers_logits_and_comes_back_bit_for_bit(case, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    directory = tmp_path / "model"
    written, stored = write_case(case, directory)
    source: str | Path = written
    if case.source == "hub id":
        put_into_hub_cache(directory, tmp_path / "hub")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        source = "some/model"
    loaded = load(source)
    assert loaded.config == stored.config
    assert_same_arrays(loaded, stored)

    # There and back, through each format that can be written.
    save(loaded, tmp_path / "saved")
    convert(source, tmp_path / "hf", to="hf")
    convert(tmp_path / "hf", tmp_path / "back")
    for place in ("saved", "hf", "back"):
        again = load(tmp_path / place)
        assert again.config == stored.config
        assert_same_arrays(again, stored)

    read_by_transformers = tmp_path / "hf" if case.source == "lsjax.save" else directory
    expected = logits_of_transformers(case, read_by_transformers, stored)
    assert expected.std() >= 1
    found = forward(load(source, "float32"), TOKENS)
    assert np.abs(found - expected).max() < 1e-4


def test_every_pair_that_exists_is_in_a_case():
    cases = matrix.every_case()
    product = 1
    for values in matrix.AXES.values():
        product *= len(values)
    assert len(cases) < product  # some combinations do not exist, and none of those was chosen
    assert set(CASES) <= set(cases)
    missing = set().union(*map(matrix.pairs, cases)) - set().union(*map(matrix.pairs, CASES))
    assert not missing
    assert len({matrix.model_of(case) for case in CASES}) == 6  # as many as pairs of them need
    for axis, values in zip(matrix.Case._fields, matrix.AXES.values(), strict=True):
        assert {getattr(case, axis) for case in CASES} == set(values)


def test_readme_has_the_table_of_these_cases():
    text = matrix.README.read_text(encoding="utf-8")
    assert matrix.with_table(text) == text, "README.md is stale: python tests/matrix.py"
