"""The hub, without a network: a cache laid out as huggingface_hub does it, and the errors that it raises."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import huggingface_hub
import pytest
from checkpoints import assert_same_arrays, random_model, write_plain, write_shards
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from lsjax import sources
from lsjax.io import load
from lsjax.sources import TOKENIZER_FILES, WEIGHT_FILES
from lsjax.text.tokenizer import load_tokenizer

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(small, tmp_path, monkeypatch):
    """A cache that holds ``some/model``; the hub itself is out of reach."""
    home = tmp_path / "hub"
    repository = home / "models--some--model"
    snapshot = repository / "snapshots" / SHA
    write_shards(snapshot, write_plain(snapshot, small))
    blobs = repository / "blobs"
    blobs.mkdir()
    for path in list(snapshot.iterdir()):  # as the hub's cache: links to blobs
        blob = blobs / f"blob-{path.name}"
        path.rename(blob)
        path.symlink_to(os.path.relpath(blob, snapshot))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(SHA)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_cached_model_loads_offline(small, hub_cache):
    assert hub_cache.is_dir()
    assert_same_arrays(load("some/model"), small)
    assert_same_arrays(load("some/model", revision=SHA, progress=False), small)


def test_hf_home_and_hf_hub_offline_are_respected(small, hub_cache):
    program = "import sys; from lsjax.io import load; print(load('some/model').num_parameters, 'torch' in sys.modules)"
    home = hub_cache.parents[3]
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}
    environment.pop("HF_HUB_CACHE", None)
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.split() == [str(small.num_parameters), "False"], result.stderr
    assert result.stderr == ""


def test_a_directory_wins_over_a_hub_id(hub_cache, tmp_path, monkeypatch):
    assert hub_cache.is_dir()
    other = random_model(9, num_hidden_layers=1)
    write_plain(tmp_path / "some" / "model", other)
    monkeypatch.chdir(tmp_path)
    assert_same_arrays(load("some/model"), other)


def test_a_model_that_is_not_cached_says_what_to_do_offline(hub_cache):
    assert hub_cache.is_dir()
    with pytest.raises(
        ConnectionError, match=r"(?s)other/model: there is no directory 'other/model' here.*HF_HUB_OFFLINE"
    ):
        load("other/model")
    with pytest.raises(ConnectionError, match="the hub cannot be reached"):
        load("some/model", revision="no-such-branch")


@pytest.mark.parametrize(
    ("raised", "expected", "message"),
    [
        (
            errors.GatedRepoError,
            PermissionError,
            r"accept its licence at https://huggingface\.co/some/model, then run `hf",
        ),
        (errors.RepositoryNotFoundError, FileNotFoundError, "there is no directory 'some/model' here.*no such model"),
        (errors.RevisionNotFoundError, FileNotFoundError, "some/model has no revision 'main'"),
        (errors.HfHubHTTPError, ConnectionError, "cannot be reached"),
        (errors.LocalEntryNotFoundError, ConnectionError, "cannot be reached.*HF_HUB_OFFLINE.*local directory"),
        (errors.OfflineModeIsEnabled, ConnectionError, "cannot be reached"),
        (errors.HFValidationError, ValueError, "neither a directory nor a hub id"),
    ],
)
def test_the_hubs_errors_become_one_clear_message(raised, expected, message, monkeypatch):
    response = {"response": mock.MagicMock()} if issubclass(raised, errors.HfHubHTTPError) else {}

    def fail(*args, **kwargs):
        raise raised("the hub's own words", **response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(expected, match=message) as error:
        load("some/model", revision="main")
    assert "\n" not in str(error.value)
    assert isinstance(error.value.__cause__, raised)
    with pytest.raises(expected, match=message):
        load_tokenizer("some/model", revision="main")


def test_a_token_that_the_hub_refuses_is_no_network_failure(monkeypatch):
    def fail(*args, **kwargs):
        raise errors.HfHubHTTPError("401\n\nInvalid credentials", response=mock.MagicMock(status_code=401))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(PermissionError, match=r"refuses access to some/model: run `hf auth login`.*401 Invalid cred"):
        load("some/model")


def test_errors_of_the_http_client_mean_that_the_hub_is_out_of_reach(monkeypatch):
    client = type("ConnectTimeout", (Exception,), {"__module__": "httpx"})

    def fail(*args, **kwargs):
        raise client("timed out")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConnectionError, match="ConnectTimeout: timed out"):
        load("some/model")


def test_other_errors_are_not_blamed_on_the_hub(monkeypatch):
    def fail(*args, **kwargs):
        raise PermissionError("cache not writable")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(PermissionError, match="cache not writable"):
        load("some/model")


def test_only_the_files_needed_are_asked_for(monkeypatch, small, tmp_path):
    asked = {}

    def fetch(hub_id, **kwargs):
        asked.update(kwargs, hub_id=hub_id)
        return str(tmp_path)

    write_plain(tmp_path, small)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    load("meta-llama/Llama-3.2-1B", revision="abc", progress=False)
    assert (asked["hub_id"], asked["revision"]) == ("meta-llama/Llama-3.2-1B", "abc")
    weights = ["config.json", "generation_config.json", "model.safetensors.index.json"]
    weights += ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    tokenizer = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
    others = ["README.md", ".gitattributes", "original/consolidated.00.pth", "original/params.json", "LICENSE.txt"]
    others += ["pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.safetensors", "onnx/model.onnx"]
    repository = weights + tokenizer + others
    assert list(filter_repo_objects(repository, allow_patterns=asked["allow_patterns"])) == weights
    assert list(filter_repo_objects(["model.safetensors"], allow_patterns=list(WEIGHT_FILES))) == ["model.safetensors"]
    assert list(filter_repo_objects(repository, allow_patterns=list(TOKENIZER_FILES))) == ["config.json", *tokenizer]


def test_an_incomplete_snapshot_names_what_is_missing(hub_cache):
    index = json.loads((hub_cache / "model.safetensors.index.json").read_text())
    shard = next(iter(index["weight_map"].values()))
    Path(hub_cache / shard).unlink()
    with pytest.raises((ValueError, ConnectionError), match=f"absent: {shard}|{shard}"):
        load("some/model")


@pytest.mark.parametrize("stored", ["model.safetensors", "pytorch_model.bin"])
def test_bin_files_are_fetched_only_where_there_are_no_safetensors(stored, tmp_path, monkeypatch):
    asked = []

    def fetch(hub_id, revision, progress, files):
        asked.append(set(files))
        (tmp_path / stored).touch()
        return tmp_path

    monkeypatch.setattr(sources, "_fetch_from_hub", fetch)
    assert sources.locate("some/model-in-the-hub") == tmp_path
    assert "pytorch_model*.bin" not in asked[0]
    assert ["pytorch_model*.bin" in files for files in asked[1:]] == [True] * (stored == "pytorch_model.bin")
    asked.clear()
    sources.locate("some/model-in-the-hub", files=TOKENIZER_FILES)
    assert asked == [set(TOKENIZER_FILES)]
