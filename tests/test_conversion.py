"""Conversion: nothing lost, nothing half-written, and no more than a tensor in memory."""

import errno
import json
import signal
import subprocess
import sys
import tracemalloc
import types
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from checkpoints import (
    assert_same_arrays,
    gguf_metadata,
    gguf_tensors,
    random_model,
    write_gguf,
    write_plain,
    write_shards,
)
from safetensors.numpy import load_file, save_file

import lsjax.cli
from lsjax import io
from lsjax.convert import rewrite, shards, writer
from lsjax.convert.checkpoint import CheckpointError
from lsjax.convert.rewrite import TARGETS
from lsjax.io import convert, load, save

EXTRA = {"pretraining_tp": 1, "use_cache": False, "torch_dtype": "bfloat16", "x-vendor": {"a": [1, None, "ä"]}}
GENERATION = {"eos_token_id": [2, 7], "temperature": 0.6, "do_sample": True, "_from_model_config": False}
TOKENIZER = {"tokenizer.json": b'{"a": 1}', "tokenizer_config.json": b"{}\r\n", "chat_template.jinja": b"{{ x }}"}


@pytest.fixture
def source(small, tmp_path):
    """A directory in Hugging Face layout, in mixed dtypes with odd bits, over three shards; and its tensors."""
    directory = tmp_path / "source"
    tensors = write_plain(directory, small, **EXTRA)
    for name in list(tensors)[::2]:
        tensors[name] = tensors[name].astype(ml_dtypes.bfloat16)
    bits = np.arange(small.config.hidden_size, dtype=np.uint16) * 1365  # NaNs, infinities, denormals among them
    tensors["model.norm.weight"] = bits.view(ml_dtypes.bfloat16)
    tensors["model.layers.1.input_layernorm.weight"] = np.linspace(0, 1e300, small.config.hidden_size)  # float64
    write_shards(directory, tensors)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    for name, content in TOKENIZER.items():
        (directory / name).write_bytes(content)
    return directory, tensors


def stored(directory) -> dict:
    return {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def names(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def assert_same_bits(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        assert value.tobytes() == np.ascontiguousarray(expected[name]).tobytes(), name


def test_there_and_back_loses_nothing(source, tmp_path):
    directory, tensors = source
    there = convert(directory, tmp_path / "flax", shard_bytes=40_000)
    back = convert(tmp_path / "flax", tmp_path / "hf", to="hf")
    assert_same_bits(stored(tmp_path / "hf"), tensors)
    weights = [name for name in names(tmp_path / "flax") if name.startswith("params-")]
    assert len(weights) > 3
    assert names(tmp_path / "flax") == sorted(
        ["config.json", "generation_config.json", *TOKENIZER, *weights, "params.safetensors.index.json"]
    )
    assert names(tmp_path / "hf") == sorted(["config.json", "generation_config.json", *TOKENIZER, "model.safetensors"])
    for name in ("config.json", "generation_config.json", *TOKENIZER):
        assert (tmp_path / "hf" / name).read_bytes() == (directory / name).read_bytes(), name
    for found in (there, back):
        assert found.files == {name: (found.directory / name).stat().st_size for name in names(found.directory)}
        assert (found.num_tensors, found.num_bytes) == (len(tensors), sum(value.nbytes for value in tensors.values()))
        assert (found.has_tokenizer, found.left_out) == (True, ())


def test_a_converted_model_is_the_model_that_load_gives(source, tmp_path):
    directory, tensors = source
    del tensors["model.layers.1.input_layernorm.weight"]  # JAX has no float64
    tensors["model.layers.1.input_layernorm.weight"] = np.ones(48, np.float32)
    write_shards(directory, tensors)
    expected = load(directory)
    for to in TARGETS:
        convert(directory, tmp_path / to, to=to)
        found = load(tmp_path / to)
        assert found.config == expected.config
        assert_same_arrays(found, expected)
    save(load(tmp_path / "hf"), tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "exported", to="hf")
    assert_same_bits(stored(tmp_path / "exported"), tensors)


def test_a_dtype_changes_the_weights_and_what_the_configuration_says_of_it(source, tmp_path):
    directory, tensors = source
    del tensors["model.layers.1.input_layernorm.weight"]
    tensors["model.layers.1.input_layernorm.weight"] = np.ones(48, np.float32)
    write_shards(directory, tensors)
    for dtype in ("float32", "bfloat16"):
        convert(directory, tmp_path / dtype, dtype=dtype, to="hf")
        assert_same_bits(stored(tmp_path / dtype), {name: value.astype(dtype) for name, value in tensors.items()})
        entries = json.loads((directory / "config.json").read_text()) | {"torch_dtype": dtype}
        assert json.loads((tmp_path / dtype / "config.json").read_text()) == entries
        assert json.loads((tmp_path / dtype / "generation_config.json").read_text()) == GENERATION
    convert(directory, tmp_path / "flax", dtype="bfloat16")
    assert_same_arrays(load(tmp_path / "flax"), load(directory, "bfloat16"))


def test_numbers_beyond_a_dtypes_range_are_refused_and_nothing_is_written(source, tmp_path):
    directory, tensors = source
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].astype(np.float32)
    tensors["model.embed_tokens.weight"][100, 7] = 7e4
    write_shards(directory, tensors)
    with pytest.raises(CheckpointError) as error:
        convert(directory, tmp_path / "flax", dtype="float16")
    assert len(error.value.problems) == 3
    for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"):
        assert any(f"out of range: {name} in model-" in line for line in error.value.problems)
    with pytest.raises(ValueError, match="dtype: expected bfloat16"):
        convert(directory, tmp_path / "flax", dtype="int8")
    assert names(tmp_path) == ["source"]


def test_copies_of_a_tied_head_and_rotary_buffers_are_left_out(tmp_path):
    params = random_model(5, tie_word_embeddings=True)
    tensors = write_plain(tmp_path / "source", params)
    extra = {
        "lm_head.weight": tensors["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    save_file(tensors | extra, tmp_path / "source" / "model.safetensors")
    found = convert(tmp_path / "source", tmp_path / "hf", to="hf")
    assert sorted(found.left_out) == sorted(extra)
    assert_same_bits(stored(tmp_path / "hf"), tensors)
    extra["lm_head.weight"] = extra["lm_head.weight"] + 1
    save_file(tensors | extra, tmp_path / "source" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        convert(tmp_path / "source", tmp_path / "flax")
    assert names(tmp_path) == ["hf", "source"]


def test_gguf_is_written_as_the_model_that_load_gives(small, tmp_path):
    pytest.importorskip("gguf")
    write_gguf(
        tmp_path / "m.gguf", gguf_metadata(small.config, **{"tokenizer.ggml.eot_token_id": 9}), gguf_tensors(small)
    )
    expected = load(tmp_path / "m.gguf")
    for to in TARGETS:
        with pytest.warns(UserWarning, match=r"no tokenizer is written: tokenizer\.ggml\.model"):
            found = convert(tmp_path / "m.gguf", tmp_path / to, to=to)
        assert not found.has_tokenizer
        assert load(tmp_path / to).config == expected.config
        assert_same_arrays(load(tmp_path / to), expected)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "float32"


def test_transformers_loads_what_is_written_for_it(source, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    directory, tensors = source
    for name in ("model.norm.weight", "model.layers.1.input_layernorm.weight"):
        tensors[name] = np.ones(48, np.float32)
    write_shards(directory, tensors)
    convert(directory, tmp_path / "flax", dtype="bfloat16")
    convert(tmp_path / "flax", tmp_path / "hf", to="hf", shard_bytes=40_000)
    loaded: Any = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto", output_loading_info=True)
    model, report = loaded
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    state = {name: value.view(torch.int16).numpy() for name, value in model.state_dict().items()}
    assert state.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(state[name], value.astype(ml_dtypes.bfloat16).view(np.int16), err_msg=name)
    assert model.generation_config.temperature == GENERATION["temperature"]
    assert model.config.eos_token_id == json.loads((directory / "config.json").read_text())["eos_token_id"]


def test_no_more_than_a_tensor_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_BLOCK_BYTES", 50_000)
    params = random_model(6, vocab_size=1500, hidden_size=192, intermediate_size=700)
    tensors = write_plain(tmp_path / "source", params)
    write_shards(tmp_path / "source", tensors, count=2)
    largest = max(value.nbytes for value in tensors.values())
    shard = min(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors"))
    assert shard > 2.5 * largest
    convert(tmp_path / "source", tmp_path / "flax")  # what is compiled and imported once
    tracemalloc.start()
    try:
        for to in TARGETS:
            for dtype in (None, "bfloat16"):
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                convert(tmp_path / "source", tmp_path / to, to=to, dtype=dtype)
                assert tracemalloc.get_traced_memory()[1] - before < 1.3 * largest, (to, dtype)
    finally:
        tracemalloc.stop()


def test_nothing_goes_to_jax(source, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "device_put", lambda *_: pytest.fail("an array was put on a device"))
    convert(source[0], tmp_path / "flax")


# Where it goes.


def test_a_destination_is_replaced_only_if_lsjax_wrote_all_of_it(source, small, tmp_path):
    directory, tensors = source
    target = tmp_path / "model"
    save(small, target)
    convert(directory, target, to="hf")
    assert_same_bits(stored(target), tensors)
    convert(directory, target, to="flax")
    (target / "README.md").write_text("mine")
    with pytest.raises(FileExistsError, match=r"holds what lsjax did not write, and is left alone: README\.md"):
        convert(directory, target)
    (target / "README.md").unlink()
    save(small, target)
    assert_same_arrays(load(target), small)
    for path in (directory / "config.json", directory):
        with pytest.raises((FileExistsError, ValueError)):
            convert(target, path)
    assert names(tmp_path) == ["model", "source"]


def test_the_destination_lies_outside_the_source(source, tmp_path, monkeypatch):
    directory, _ = source
    before = names(directory)
    monkeypatch.chdir(tmp_path)
    for target in (directory, directory / "flax", "source/./deep/er", tmp_path / "x" / ".." / "source"):
        with pytest.raises(ValueError, match=r"the destination .* must lie outside the source"):
            convert(directory, target)
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(ValueError, match="must lie outside"):
        convert(tmp_path / "link", directory)
    assert names(directory) == before


@pytest.mark.parametrize("when", ["before", "while writing"])
def test_no_space_is_one_clear_error(when, source, tmp_path, monkeypatch, capsys):
    if when == "before":
        monkeypatch.setattr(rewrite.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=3))
        message = r"expected 1..,... bytes of free space, got 3"
    else:
        real = writer._blocks

        def blocks(output):
            if output.name.startswith("norm"):
                raise OSError(errno.ENOSPC, "No space left on device")
            yield from real(output)

        monkeypatch.setattr(writer, "_blocks", blocks)
        message = "No space left on device"
    with pytest.raises(OSError, match=rf"model cannot be written \({message}\); nothing was changed") as error:
        convert(source[0], tmp_path / "deep" / "model")
    assert error.value.errno == errno.ENOSPC
    assert names(tmp_path) == ["source"]
    assert lsjax.cli.main(["convert", str(source[0]), str(tmp_path / "deep" / "model")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_source_that_does_not_load_is_refused_before_anything_is_written(source, tmp_path):
    directory, _ = source
    next(directory.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"absent: model-0000"):
        convert(directory, tmp_path / "a" / "b")
    with pytest.raises(ValueError, match="to: expected 'flax' or 'hf', got 'gguf'"):
        convert(directory, tmp_path / "a", to="gguf")  # type: ignore[arg-type]
    assert names(tmp_path) == ["source"]


# Each child ends itself with SIGKILL at one point of writing its target.
KILLED = """
import os, pathlib, shutil, signal, sys
from lsjax.convert import directory, writer
from lsjax.io import convert

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def in_the_weights():
    real, calls = writer._blocks, []
    def blocks(output):
        calls.append(output)
        for block, overflows in real(output):
            yield (block[: len(block) // 2], overflows) if len(calls) == 9 else (block, overflows)
            len(calls) == 9 and die()
    writer._blocks = blocks

def before_the_rename():
    directory._rename = die

def between_the_renames():
    real = pathlib.Path.rename
    pathlib.Path.rename = lambda self, other: real(self, other) if other.name.endswith(".old") else die()

def before_the_old_is_removed():
    directory.shutil = type("", (), {"rmtree": staticmethod(die)})

points = [in_the_weights, before_the_rename, between_the_renames, before_the_old_is_removed]
convert(sys.argv[1], sys.argv[2] + "/warm")
for point in points:
    child = os.fork()
    if not child:
        point()
        convert(sys.argv[1], sys.argv[2] + "/" + point.__name__)
        os._exit(0)
    print(point.__name__, os.waitpid(child, 0)[1])
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork and SIGKILL")
def test_a_killed_conversion_leaves_nothing_or_everything_and_the_next_succeeds(source, small, tmp_path):
    directory, _ = source
    points = ["in_the_weights", "before_the_rename", "between_the_renames", "before_the_old_is_removed"]
    home = tmp_path / "home"
    home.mkdir()
    (home / ".in_the_weights.backup").mkdir()
    old = jax.tree.map(lambda leaf: leaf * 2, small)
    for point in points[2:]:
        save(old, home / point)
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(directory), str(home)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert run.stdout.split() == [word for point in points for word in (point, str(int(signal.SIGKILL)))], run.stderr
    expected = stored(home / "warm")
    left = [name for name in names(home) if ".lsjax-" in name]
    assert len(left) == 5  # two of the third: the new directory, and the old one that was moved away
    for point in points[:3]:
        assert not (home / point).exists()
    assert_same_bits(stored(home / points[3]), expected)
    for point in points:
        convert(directory, home / point)
        assert_same_bits(stored(home / point), expected)
        assert names(home / point) == names(home / "warm")
    assert names(home) == sorted([*points, "warm", ".in_the_weights.backup"])


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_what_a_killed_one_had_moved_away_comes_back_even_if_the_next_fails(source, small, tmp_path):
    save(small, tmp_path / "model")
    (tmp_path / "model").rename(tmp_path / ".model.lsjax-01234567.old")
    (tmp_path / ".model.lsjax-01234567").mkdir()
    directory, tensors = source
    tensors["model.norm.weight"] = np.full(48, 7e4, np.float32)
    write_shards(directory, tensors)
    with pytest.raises(CheckpointError, match="out of range"):
        convert(directory, tmp_path / "model", dtype="float16")
    assert_same_arrays(load(tmp_path / "model"), small)
    assert names(tmp_path) == ["model", "source"]


# The command.


def test_the_command_says_what_it_wrote(source, tmp_path, capfd):
    directory, tensors = source
    arguments = ["convert", str(directory), str(tmp_path / "hf"), "--to", "hf", "--shard-size", "40kB"]
    assert lsjax.cli.main(arguments) == 0
    out, err = capfd.readouterr()
    assert err == ""
    files = len(list((tmp_path / "hf").glob("*.safetensors")))
    assert files > 3
    assert out.startswith(f"{tmp_path / 'hf'}: {len(tensors)} tensors, ")
    assert f" kB, in {files} files (hf); with a tokenizer; " in out
    assert out.endswith(" s\n")
    assert_same_bits(stored(tmp_path / "hf"), tensors)
    assert lsjax.cli.main(["convert", str(directory), str(tmp_path / "flax"), "--dtype", "float16"]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"lsjax convert: error: {directory}: cannot load {directory}: out of range: model.")


def test_progress_is_shown_when_asked_for(source, tmp_path, capfd):
    convert(source[0], tmp_path / "a", progress=True)
    assert "Converting" in capfd.readouterr().err
    convert(source[0], tmp_path / "b", progress=False)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "a"], "required: DST"),
        (["convert", "a", "b", "--to", "gguf"], "invalid choice: 'gguf'"),
        (["convert", "a", "b", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["convert", "a", "b", "--shard-size", "0"], "expected a size such as 5GB or 500MB, got '0'"),
        (["convert", "a", "b", "--shard-size", "5XB"], "got '5XB'"),
        (["convert", "./no such place", "b"], "no such file or directory"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments, message, capsys):
    assert lsjax.cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("lsjax convert: error: ")
    assert message in err


def test_names_and_defaults_are_the_library_s():
    from lsjax.cli.convert import TARGETS as NAMES
    from lsjax.cli.convert import make_parser

    assert set(NAMES) == set(TARGETS)
    options = make_parser().parse_args(["a", "b"])
    assert (options.to, options.dtype, options.shard_size) == ("flax", None, writer.SHARD_BYTES)


@pytest.mark.parametrize(
    ("text", "count"), [("5GB", 5 * 10**9), ("1.5 mb", 1_500_000), ("40k", 40_000), ("7", 7), ("2TB", 2 * 10**12)]
)
def test_sizes(text, count):
    from lsjax.cli.parser import byte_count

    assert byte_count(text) == count


@pytest.mark.demo
@pytest.mark.slow
def test_the_demo_converts_with_its_tokenizer(tmp_path):
    from lsjax.text.tokenizer import load_tokenizer

    found = io.convert("demo", tmp_path / "model", dtype="bfloat16", shard_bytes=100_000_000)
    assert (found.has_tokenizer, found.num_bytes) == (True, 2 * 134_515_008)
    assert_same_arrays(load(tmp_path / "model"), load("demo", "bfloat16"))
    ours, theirs = load_tokenizer(tmp_path / "model"), load_tokenizer("demo")
    text = "Once upon 123 times, ein Bär 🐻\n\tsaid <|im_start|>hello"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert (ours.eos_token_id, ours.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
    turns = [{"role": "user", "content": "Hi"}]
    assert ours.apply_chat_template(turns, tokenize=False) == theirs.apply_chat_template(turns, tokenize=False)
    assert shards.list_tensors(tmp_path / "model", "params.safetensors").problems == ()
