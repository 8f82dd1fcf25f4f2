"""Files of weights are mapped into memory, and have no part in a model once it is loaded."""

import jax
import numpy as np
import pytest
from checkpoints import assert_same_arrays, random_model

import lsjax
from lsjax.convert import assemble
from lsjax.convert.checkpoint import CheckpointError, read_array
from lsjax.io import load


@pytest.fixture(scope="module")
def model():
    return random_model(1, attention_bias=True)


@pytest.mark.parametrize("offset", [0, 3, 8, 4096, 5001])
@pytest.mark.parametrize("shape", [(), (7,), (3, 0), (33, 50)])
def test_an_array_anywhere_in_a_file(offset, shape, tmp_path):
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    path = tmp_path / "weights"
    path.write_bytes(bytes(offset) + array.tobytes())
    found = read_array(path, offset, shape, array.dtype)
    np.testing.assert_array_equal(found, array)
    assert found.shape == shape
    assert found.flags.aligned
    if array.size:
        with pytest.raises(CheckpointError, match=f"truncated: expected {offset + 1 + array.nbytes:,} bytes, got"):
            read_array(path, offset + 1, shape, array.dtype)


def test_a_loaded_model_can_be_donated(model, tmp_path):
    """To a program whose results have the shapes of its arguments, again and again, and to ``prepare``."""
    lsjax.save(model, tmp_path / "model")
    halve = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf / 2, params), donate_argnums=0)
    loaded = load(tmp_path / "model")
    quarter = halve(halve(loaded))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(loaded))
    assert_same_arrays(quarter, jax.tree.map(lambda leaf: leaf / 4, model))
    prepared = lsjax.prepare(load(tmp_path / "model"), donate=True)
    expected = lsjax.prepare(model)
    assert jax.tree.structure(prepared) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves(prepared), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("to", ["flax", "hf"])
def test_a_file_cut_short_while_it_is_read_is_an_error(to, model, tmp_path, monkeypatch):
    lsjax.save(model, tmp_path / "model", to=to)
    (path,) = (tmp_path / "model").glob("*.safetensors")
    plan = assemble.checked_plan

    def plan_and_cut(checkpoint):
        found = plan(checkpoint)
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2)
        return found

    monkeypatch.setattr(assemble, "checked_plan", plan_and_cut)
    with pytest.raises(CheckpointError, match=r"truncated: expected .* bytes, got"):
        load(tmp_path / "model")


@pytest.mark.parametrize("to", ["flax", "hf"])
def test_a_loaded_model_outlives_its_file(to, model, tmp_path):
    """Replaced, written over or cut short: the arrays share nothing with the file."""
    lsjax.save(model, tmp_path / "model", to=to)
    first = load(tmp_path / "model")
    lsjax.save(jax.tree.map(lambda leaf: leaf + 1, model), tmp_path / "model", to=to)  # another file takes its place
    second = load(tmp_path / "model")
    (path,) = (tmp_path / "model").glob("*.safetensors")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(size))
    with path.open("r+b") as file:
        file.truncate(0)
    assert_same_arrays(first, model)
    assert_same_arrays(second, jax.tree.map(lambda leaf: leaf + 1, model))
