"""Damaged checkpoints under ``inspect``, and damaged PyTorch files: a description or the one error, nothing else."""

import random

import numpy as np
import pytest
from checkpoints import gguf_metadata, gguf_tensors, random_model, write_gguf, write_plain, write_shards
from hostile import fails, flip, loads_or_fails, mutate_json, splice, truncate

from lsjax.io import inspect, load


@pytest.fixture(scope="module")
def tiny():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 8}
    return random_model(1, num_hidden_layers=1, **sizes)


def inspect_whole(path):
    """Everything that is told of a checkpoint, down to its JSON form."""
    return inspect(path).to_dict()


def damaged(rng, path, data: bytes, end: int) -> bytes:
    if path.suffix == ".json" and rng.random() < 0.7:
        return mutate_json(rng, data)
    return rng.choice([truncate(rng, data), flip(rng, data, end), splice(rng, data, end)])


def test_inspecting_damaged_directories(tiny, tmp_path):
    tensors = write_plain(tmp_path, tiny)
    write_shards(tmp_path, tensors, count=2)
    whole = {path: path.read_bytes() for path in tmp_path.iterdir()}
    inspect_whole(tmp_path)
    rng = random.Random(1)
    for _ in range(120):
        path = rng.choice(sorted(whole))
        path.write_bytes(damaged(rng, path, whole[path], min(len(whole[path]), 800)))
        loads_or_fails(tmp_path, inspect_whole)
        path.write_bytes(whole[path])


def test_inspecting_damaged_gguf_files(tiny, tmp_path):
    pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf_metadata(tiny.config), gguf_tensors(tiny))
    whole = path.read_bytes()
    end = whole.index(b"output_norm.weight") + 64
    rng = random.Random(2)
    for _ in range(120):
        path.write_bytes(damaged(rng, path, whole, end))
        loads_or_fails(path, inspect_whole)


@pytest.fixture
def pytorch(tiny, tmp_path):
    """A directory of ``pytorch_model.bin`` that loads."""
    torch = pytest.importorskip("torch")
    tensors = write_plain(tmp_path, tiny)
    (tmp_path / "model.safetensors").unlink()
    state = {name: torch.tensor(np.array(value)) for name, value in tensors.items()}
    torch.save(state, tmp_path / "pytorch_model.bin")
    load(tmp_path)
    return tmp_path / "pytorch_model.bin"


def test_damaged_pytorch_files_load_or_fail(pytorch):
    whole = pytorch.read_bytes()
    rng = random.Random(3)
    refused = 0
    for _ in range(120):
        pytorch.write_bytes(damaged(rng, pytorch, whole, len(whole)))
        refused += loads_or_fails(pytorch.parent)
        loads_or_fails(pytorch.parent, inspect_whole)
    assert refused > 40


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\nsize 9\n", "git-lfs pointer: pytorch_model.bin"),
        (b"", "empty: pytorch_model.bin"),
        (b"PK\x03\x04" + bytes(60), "pytorch_model.bin"),
        (b"\x80\x02}q\x00.", "pytorch_model.bin"),
    ],
)
def test_pytorch_files_that_are_none(content, words, pytorch):
    pytorch.write_bytes(content)
    fails(pytorch.parent, words)
