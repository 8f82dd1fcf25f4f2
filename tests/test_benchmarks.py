"""The benchmarks as they stand, with a tiny model: a rehearsal, whose figures mean nothing and are only looked for."""

import dataclasses
import importlib
import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from checkpoints import assert_same_arrays, model_config
from support import random_params

import lsjax

pytestmark = pytest.mark.usefixtures("fewer_optimizations")

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / "tiny"
    lsjax.save(
        random_params(model_config(vocab_size=128, num_hidden_layers=3), 0, deep_from=1, deep_scale=0.2), directory
    )
    return directory


def run(name, arguments, tmp_path, monkeypatch):
    """A benchmark's results, from a call of its ``main``."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--repetitions", "1", "--out", str(tmp_path), *map(str, arguments)])
    importlib.import_module(name).main()
    assert not list(tmp_path.glob("*.part"))
    assert (tmp_path / f"{name}.md").read_text().startswith("| ")
    return json.loads((tmp_path / f"{name}.json").read_text())


@pytest.mark.slow
def test_decode(model, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    arguments = ["--model", model, "--dtypes", "float32", "--batches", "2,1", "--exit-layer", 1, "--new-tokens", 6]
    (found,) = run("decode", [*arguments, "--prefill", "16"], tmp_path, monkeypatch)["runs"]
    compared = [entry for entry in found["entries"] if entry["system"] != "lsjax"]
    expected = {"transformers": {("autoregressive", 1), ("autoregressive", 2), ("early exit", 1), ("prefill", 16)}}
    if importlib.util.find_spec("llama_cpp") is not None:
        expected["llama.cpp"] = {("autoregressive", 1), ("prefill", 16)}
    assert found["rivals"].keys() == expected.keys()
    for name, kinds in expected.items():
        assert {(entry["kind"], entry["size"]) for entry in compared if entry["system"] == name} == kinds
    assert all(entry["same_tokens"] for entry in compared)
    assert all(entry["ratio"]["median"] > 0 for entry in compared)
    assert found["bandwidth_utilization"] > 0
    assert (tmp_path / "decode.png").stat().st_size > 1000


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_file_for_llama_cpp_holds_the_same_numbers(dtype, tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    rivals = importlib.import_module("rivals")
    params = random_params(model_config(num_key_value_heads=2, attention_bias=True), 1)
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    loaded = lsjax.load(rivals.save_gguf(params, tmp_path / "model.gguf"))
    assert loaded.config.num_key_value_heads == 2
    assert_same_arrays(loaded, jax.tree.map(lambda leaf: leaf.astype("float32"), params))
    scaled = dataclasses.replace(params.config, rope_scaling=lsjax.config.RopeScaling("linear", factor=2.0))
    with pytest.raises(ValueError, match="rope_scaling: expected None"):
        rivals.save_gguf(lsjax.Params(scaled, params.tree), tmp_path / "scaled.gguf")


@pytest.mark.slow
def test_rounds_and_sharing(model, tmp_path, monkeypatch):
    arguments = ["--model", model, "--exit-layers", "1", "--num-speculations", 2]
    (found,) = run("rounds", [*arguments, "--new-tokens", 12], tmp_path, monkeypatch)["runs"]
    assert found["same_tokens"]
    costs = found["costs"]
    assert costs["predicted_round"] == costs["drafting"]["median"] + costs["verification"]["median"]
    line = [found["predicted_line"][key] for key in ("0.00", "0.50", "1.00")]
    assert line[1] / line[0] == pytest.approx(2)  # two drafts a round: 1, 2 and 3 tokens
    assert line[2] / line[0] == pytest.approx(3)
    assert 0 < found["acceptance_rate"] <= 1
    assert found["predicted"] == pytest.approx(line[0] * found["tokens_per_round"])
    (sharing,) = run("sharing", [*arguments, "--length", 16], tmp_path, monkeypatch)["runs"].values()
    assert sharing["ratio"]["median"] == sharing["separate"]["median"] / sharing["shared"]["median"]


@pytest.mark.slow
def test_growth(model, tmp_path, monkeypatch):
    arguments = ["--model", model, "--lengths", "8,16", "--capacities", "300,600", "--batches", "1", "--drafts", "1"]
    found = run("growth", [*arguments, "--exit-layers", "1"], tmp_path, monkeypatch)
    sizes = {name: list(curve) for name, curve in found["seconds"].items()}
    assert sizes == {
        "context length": ["8", "16"],
        "capacity": ["300", "600"],
        "batch": ["1"],
        "drafts a round": ["1"],
        "exit layer": ["1"],
    }
    assert found["capacity_ratio"]["median"] > 0


@pytest.mark.slow
def test_compile_counts_programs_and_what_the_cache_held(model, tmp_path, monkeypatch):
    found = run("compile", ["--model", model, "--exit-layer", 1], tmp_path, monkeypatch)["runs"]
    for states in found.values():
        cold, warm = states["cold"], states["warm"]
        assert cold["cache_hits"] == 0
        assert (
            warm["cache_hits"]
            == warm["programs"] + warm["programs_of_load"]
            == cold["programs"] + cold["programs_of_load"]
        )


GPU = ["--toy", "--batches", "1", "--lengths", "8,16", "--new-tokens", "8", "--shapes", "llama-3.2-1b"]


@pytest.mark.slow
def test_the_gpu_script_rehearsed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu = importlib.import_module("gpu")

    def run_here(shape, stages, flags, seconds, scale=None):
        """Its parts in this process, where the second finds the first one's programs compiled."""
        options = ["--seconds", str(seconds), "--part", shape, stages] + (
            [] if scale is None else ["--scale", str(scale)]
        )
        lines = []
        with monkeypatch.context() as context:
            context.setattr(sys, "argv", [*sys.argv, *options])
            context.setattr("builtins.print", lambda line, flush: lines.append(json.loads(line)))
            gpu.main()
        return lines

    monkeypatch.setattr(gpu, "_run", run_here)
    found = run("gpu", GPU, tmp_path, monkeypatch)["results"]
    with_buffers, without = ([line for line in found if bool(line["xla_flags"]) == off] for off in (False, True))
    stages = ["device", "correctness", "calibration", "decode", "rounds", "growth", "growth", "growth", "growth"]
    assert [line["stage"] for line in with_buffers] == stages
    assert [line["stage"] for line in without] == ["device", "calibration", "decode"]
    correct = with_buffers[1]
    assert correct["largest_logit_error"] == 0  # here the device is the CPU
    assert correct["rows_equal_to_cpu"] == [4] * 4
    assert correct["rows_equal_both_ways"] == 4
    decode = with_buffers[3]
    assert 0.5 < decode["acceptance_rate"] <= 1
    assert decode["rows_equal"] == 1
    assert math.isfinite(decode["bandwidth_utilization"])
    assert without[-1]["acceptance_rate"] == decode["acceptance_rate"]  # the same model, by the scale handed on


def test_the_gpu_script_needs_only_what_an_image_for_jax_has(tmp_path):
    missing = [
        "matplotlib",
        "tqdm",
        "transformers",
        "huggingface_hub",
        "tokenizers",
        "optax",
        "jinja2",
        "torch",
        "gguf",
    ]
    script = (
        f"import sys, runpy; sys.modules.update(dict.fromkeys({missing}))\n"
        f"sys.path.insert(0, {str(BENCHMARKS)!r})\n"
        f"sys.argv = ['gpu.py', *{GPU}, '--part', 'llama-3.2-1b', 'none']\n"
        f"runpy.run_path({str(BENCHMARKS / 'gpu.py')!r}, run_name='__main__')\n"
        "import common; common.describe()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stage"] == "device"


@pytest.mark.slow
def test_options(model, tmp_path, monkeypatch):
    arguments = ["--model", model, "--exit-layer", 1, "--num-speculations", 2, "--new-tokens", 8, "--draft-vocab", 50]
    entries = run("options", arguments, tmp_path, monkeypatch)["entries"]
    drafting = [entry for entry in entries if entry["against"] == "self-speculative"]
    assert len(drafting) == 9
    assert all(entry["same_tokens"] for entry in drafting[:6])
    assert all(entry["drafted"] <= drafting[0]["drafted"] for entry in drafting[1:5])
    assert all(entry["speed"]["median"] > 0 for entry in entries)
