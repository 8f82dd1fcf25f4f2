"""PyTorch's .bin checkpoints, written here by torch; and pickles that would run code."""

import collections
import json
import pickle
import shutil
import sys
import zipfile

import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same_arrays, random_model, write_config, write_plain

from lsjax.convert import pytorch
from lsjax.convert.checkpoint import CheckpointError
from lsjax.io import convert, load

torch = pytest.importorskip("torch")

LEGACY = {"_use_new_zipfile_serialization": False}


def state_of(directory, params) -> dict:
    """The model's tensors in torch, and ``config.json`` in the directory."""
    tensors = write_plain(directory, params)
    (directory / "model.safetensors").unlink()
    return {name: torch.tensor(value) for name, value in tensors.items()}


@pytest.fixture
def state(small, tmp_path):
    return state_of(tmp_path, small)


def write_bins(directory, state, count=3, **options):
    names = sorted(state)
    files = {f"pytorch_model-{i + 1:05}-of-{count:05}.bin": names[i::count] for i in range(count)}
    for file, held in files.items():
        torch.save({name: state[name] for name in held}, directory / file, **options)
    placed = {name: file for file, held in files.items() for name in held}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    return files


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "sharded"])
def test_bin_files_hold_the_model(options, sharded, small, state, tmp_path):
    if sharded:
        write_bins(tmp_path, state, **options)
    else:
        torch.save(collections.OrderedDict(state), tmp_path / "pytorch_model.bin", **options)
    assert_same_arrays(load(tmp_path), small)


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_half_precision_is_bit_exact(options, state, tmp_path):
    bits = np.arange(48, dtype=np.uint16) * 1365  # NaNs, infinities, denormals among them
    state["model.norm.weight"] = torch.tensor(bits.view(np.int16)).view(torch.bfloat16)
    state["model.layers.0.mlp.up_proj.weight"] = state["model.layers.0.mlp.up_proj.weight"].half()
    torch.save(state, tmp_path / "pytorch_model.bin", **options)
    tree = load(tmp_path).tree
    assert tree["norm"]["scale"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(np.asarray(tree["norm"]["scale"]).view(np.uint16), bits)
    found = np.asarray(tree["layers_0"]["mlp"]["up_proj"]["kernel"]).T
    np.testing.assert_array_equal(found, state["model.layers.0.mlp.up_proj.weight"].numpy())


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_views_of_shared_storages_are_read_as_they_are(options, small, state, tmp_path):
    fused = torch.cat([state[f"model.layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    gate, up = fused.chunk(2)
    turned = state["model.layers.1.mlp.down_proj.weight"].T.contiguous().T
    assert up.storage_offset()
    assert not turned.is_contiguous()
    state |= {
        "model.layers.0.mlp.gate_proj.weight": torch.nn.Parameter(gate),
        "model.layers.0.mlp.up_proj.weight": up,
        "model.layers.1.mlp.down_proj.weight": turned,
    }
    torch.save(state, tmp_path / "pytorch_model.bin", **options)
    assert_same_arrays(load(tmp_path), small)


def test_a_tied_head_is_the_embedding(tmp_path):
    params = random_model(5, tie_word_embeddings=True)
    state = state_of(tmp_path, params)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same_arrays(load(tmp_path), params)
    found = convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-hf", to="hf")
    assert found.left_out == ("lm_head.weight",)
    assert_same_arrays(load(found.directory), params)
    shutil.rmtree(found.directory)


def test_an_index_decides_and_safetensors_come_first(small, state, tmp_path):
    other = {name: value * 2 for name, value in state.items()}
    torch.save(other, tmp_path / "pytorch_model.bin")
    write_bins(tmp_path, state)
    assert_same_arrays(load(tmp_path), small)
    (tmp_path / "pytorch_model.bin.index.json").write_text("{")
    write_plain(tmp_path, small)
    assert_same_arrays(load(tmp_path), small)


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain pickle", "newer pickle", "behind the tensors"])
def test_a_pickle_never_runs_code(kind, state, tmp_path):
    made = tmp_path / "made"
    path = tmp_path / "pytorch_model.bin"
    bad = state | {"model.norm.weight": Payload(made)}
    if kind in ("plain pickle", "newer pickle"):
        path.write_bytes(pickle.dumps(bad["model.norm.weight"], protocol=2 if kind == "plain pickle" else 4))
    else:
        torch.save(bad, path, **(LEGACY if kind == "legacy" else {}))
    if kind == "behind the tensors":
        path.rename(tmp_path / "bad.bin")
        index = {"weight_map": dict.fromkeys(state, "bad.bin")}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    reason = (
        "Unsupported operand" if kind == "newer pickle" else r"its pickle wants to call \S*open, which could run code"
    )
    with pytest.raises(CheckpointError, match=rf"refused: .*\.bin .*: {reason}") as error:
        load(tmp_path)
    assert len(error.value.problems) == 1
    with pytest.raises(CheckpointError):
        convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-out")
    assert not made.exists()
    with (tmp_path / "control").open("wb") as file:  # the payload works
        pickle.dump(Payload(made), file)
    with (tmp_path / "control").open("rb") as file:
        pickle.load(file).close()
    assert made.exists()


def test_everything_that_does_not_fit_is_named(state, tmp_path):
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.mlp.up_proj.weight"] = torch.ones(80, 47)
    state["model.norm.weight"] = torch.ones(48, dtype=torch.int64)
    state["model.layers.0.input_layernorm.weight"] = torch.ones(48).to_sparse()
    torch.save(state | {"step": 3, "extra": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    expected = "expected F16, BF16, F32, F64, got"
    assert sorted(error.value.problems) == [
        "missing: model.layers.1.mlp.up_proj.weight [80, 48]",
        "unexpected: extra [2] in pytorch_model.bin",
        "unexpected: step in pytorch_model.bin: expected a tensor, got int",
        f"wrong dtype: model.layers.0.input_layernorm.weight in pytorch_model.bin: {expected} no plain array",
        f"wrong dtype: model.norm.weight in pytorch_model.bin: {expected} int64",
        "wrong shape: model.layers.0.mlp.up_proj.weight in pytorch_model.bin: expected [80, 48], got [80, 47]",
    ]


@pytest.mark.parametrize("options", [{}, LEGACY], ids=["zip", "legacy"])
def test_damaged_files_are_refused(options, state, tmp_path):
    path = tmp_path / "pytorch_model.bin"
    torch.save(state, path, **options)
    whole = path.read_bytes()
    for data in (b"", b"PK", whole[:100], whole[: len(whole) // 2], b"\0" * 500):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin \([0-9,]+ bytes\)"):
            load(tmp_path)
    torch.save([1, 2], path, **options)
    with pytest.raises(CheckpointError, match="expected a dictionary of tensors, got list"):
        load(tmp_path)


def test_tensors_that_claim_more_than_the_file_holds_are_refused(small, state, tmp_path):
    good, bad = tmp_path / "good.bin", tmp_path / "pytorch_model.bin"
    torch.save({"model.norm.weight": torch.ones(48)}, good)

    def copy(change, packing=zipfile.ZIP_STORED):
        with zipfile.ZipFile(good) as source, zipfile.ZipFile(bad, "w", packing) as target:
            for record in source.infolist():
                target.writestr(record.filename, change(record.filename, source.read(record)))

    copy(lambda name, data: data[:-4] if name.endswith("data/0") else data)
    with pytest.raises(CheckpointError, match=r"truncated or altered: model\.norm\.weight .*larger than what the file"):
        load(tmp_path)
    copy(lambda name, data: data, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="expected records without compression"):
        load(tmp_path)
    write_config(tmp_path, small.config)


def test_zip_files_are_read_by_offset_without_torch(small, state, tmp_path, monkeypatch):
    write_bins(tmp_path, state)
    real, devices = torch.load, []

    def load_(*args, **kwargs):
        assert kwargs["weights_only"] is True
        devices.append(kwargs["map_location"])
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "load", load_)
    assert_same_arrays(load(tmp_path), small)
    assert devices == ["meta"] * 3


def test_legacy_files_are_held_one_at_a_time(small, state, tmp_path, monkeypatch):
    files = write_bins(tmp_path, state, **LEGACY)
    real, loaded = torch.load, []

    def load_(path, **kwargs):
        if kwargs["map_location"] == "cpu":
            loaded.append(path.name)
        return real(path, **kwargs)

    monkeypatch.setattr(torch, "load", load_)
    assert_same_arrays(load(tmp_path), small)
    assert loaded == list(files)


def test_without_torch_the_extra_is_named(state, tmp_path, monkeypatch):
    torch.save(state, tmp_path / "pytorch_model.bin")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        with pytest.raises(ImportError, match=r"pip install 'lsjax\[torch\]'"):
            load(tmp_path)
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    with pytest.raises(ImportError, match=r"need torch 2\.6 or newer, got 2\.5\.1"):
        load(tmp_path)
    assert pytorch.WEIGHTS == "pytorch_model.bin"
