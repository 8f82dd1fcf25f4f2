"""What a start costs: which modules are imported, and which programs are compiled again."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from checkpoints import model_config, write_byte_tokenizer
from support import random_params

import lsjax
from lsjax.cli import launch
from lsjax.text.tokenizer import load_tokenizer

HEAVY = (
    "jax",
    "flax",
    "numpy",
    "optax",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "safetensors",
    "tqdm",
    "torch",
)


def python(*arguments, **environment):
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)


def test_nothing_heavy_is_imported_before_it_is_used():
    found = python(
        "-c",
        "import sys, lsjax, lsjax.cli\n"
        "assert lsjax.cli.main(['generate', '--nonsense']) == 2\n"
        "try: lsjax.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        f"print(sorted(set({HEAVY}) & set(sys.modules)))\n"
        "lsjax.generate\n"
        f"print(sorted(set({HEAVY}) & set(sys.modules)))",
    ).stdout.splitlines()
    assert any("commands:" in line for line in found)
    assert found[-2] == "[]"
    assert found[-1] == "['flax', 'jax', 'numpy']"


def test_headers_are_read_and_converted_without_jax(tmp_path):
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    lsjax.save(random_params(model_config(), 0), old)
    commands = [["inspect", old], ["convert", old, new, "--to", "hf", "--dtype", "bfloat16"]]
    found = python(
        "-c",
        "import sys, lsjax.cli\n"
        f"for arguments in {commands}:\n"
        "    assert lsjax.cli.main(arguments) == 0\n"
        "    print(sorted({'jax', 'flax', 'optax', 'transformers', 'huggingface_hub', 'torch'} & set(sys.modules)))",
    ).stdout.splitlines()
    assert [line for line in found if line.startswith("[")] == ["[]", "[]"]
    assert lsjax.load(new).dtype == "bfloat16"


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="looks at whether torch is imported")
def test_a_tokenizer_of_one_file_imports_no_torch(tmp_path):
    write_byte_tokenizer(tmp_path)
    found = python(
        "-c",
        "import sys; from lsjax.text.tokenizer import load_tokenizer\n"
        f"print(load_tokenizer({str(tmp_path)!r})('ab')['input_ids'], 'torch' in sys.modules)",
    ).stdout
    assert found == f"{load_tokenizer(tmp_path)('ab')['input_ids']} False\n"


def test_every_public_name_is_there():
    assert set(lsjax.__all__) <= set(dir(lsjax))
    assert {name: getattr(lsjax, name).__module__ for name in lsjax._HOMES} == lsjax._HOMES
    assert set(lsjax.__all__) == {*lsjax._HOMES, "measure", "processors", "training"}
    assert lsjax.io.load is lsjax.load
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        lsjax.lod  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


@pytest.fixture
def settings(monkeypatch, tmp_path):
    """What the launcher adds to an environment of nothing but these variables, the home a temporary directory."""

    def found(**environment):
        given = {"HOME": str(tmp_path)} | {name: str(value) for name, value in environment.items()}
        after = dict(given)
        monkeypatch.setattr(os, "environ", after)
        launch.keep_compiled_programs()
        monkeypatch.undo()
        assert given.items() <= after.items()
        return {name: value for name, value in after.items() if name not in given}

    return found


def test_where_compiled_programs_are_kept(settings, tmp_path, capsys):
    default = tmp_path / ".cache" / "lsjax" / "compilation"
    assert settings() == {"JAX_COMPILATION_CACHE_DIR": str(default), **launch._SETTINGS}
    elsewhere = tmp_path / "elsewhere"
    assert settings(XDG_CACHE_HOME=elsewhere)["JAX_COMPILATION_CACHE_DIR"] == f"{elsewhere}/lsjax/compilation"
    assert settings(LSJAX_COMPILATION_CACHE=elsewhere)["JAX_COMPILATION_CACHE_DIR"] == str(elsewhere)
    assert settings(LSJAX_COMPILATION_CACHE="~/here")["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "here")
    name = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    assert name not in settings(**{name: "5"})  # the user's own
    for off in ("", "0", "off"):
        assert settings(LSJAX_COMPILATION_CACHE=off) == {}
    for theirs in ("/theirs", ""):
        assert settings(JAX_COMPILATION_CACHE_DIR=theirs) == {}
    assert capsys.readouterr().err == ""
    assert not list(tmp_path.iterdir())  # before a program is kept


def test_a_user_without_a_home_has_no_cache(settings, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(launch.Path, "home", no_home)
    assert settings() == {}


def write_aged(path, size, age):
    path.write_bytes(bytes(size))
    os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))


def test_what_was_used_longest_ago_is_dropped(tmp_path):
    kept = launch.KeptPrograms(tmp_path / "programs", asked_for=False)
    kept.drop_oldest(0)  # there is none yet
    kept.directory.mkdir()
    for age, name in enumerate("abcde"):
        write_aged(kept.directory / name, 10, 100 * age)
    os.utime(kept.directory / "e", (kept.start, 0))  # read now, written long ago
    kept.drop_oldest(50)
    assert sorted(path.name for path in kept.directory.iterdir()) == list("abcde")
    kept.drop_oldest(25)
    assert sorted(path.name for path in kept.directory.iterdir()) == ["a", "e"]


def test_trouble_with_programs_is_told_once_where_asked_for_and_its_files_go(tmp_path, capsys):
    def names():
        return sorted(path.name for path in tmp_path.iterdir())

    kept = launch.KeptPrograms(tmp_path, asked_for=True)
    for name in ("jit_f-1-cache", "jit_f-2-cache", "jit_f2-1-cache"):
        write_aged(tmp_path / name, 10, 100)
    (tmp_path / "jit_f-3-cache").write_bytes(b"half a program")
    start = "persistent compilation cache entry for"
    assert kept.take_warning("lsjax", f"Error writing {start} 'jit_f': OSError: no space")
    assert names() == ["jit_f-1-cache", "jit_f-2-cache", "jit_f2-1-cache"]
    assert kept.take_warning("lsjax", f"Error reading {start} 'jit_f': error: truncated\nstream")
    assert names() == ["jit_f2-1-cache"]
    assert not kept.take_warning("lsjax", "an overflow")
    told = (
        f"lsjax: warning: LSJAX_COMPILATION_CACHE={tmp_path}: trouble in writing compiled programs (OSError: no space)"
    )
    assert capsys.readouterr().err == f"{told}\n"
    launch.KeptPrograms(tmp_path, asked_for=False).take_warning("lsjax", f"Error reading {start} 'jit_f2': no")
    assert names() == []
    assert capsys.readouterr().err == ""


@pytest.fixture(scope="module")
def generate(tmp_path_factory):
    """Runs ``lsjax generate`` in a process of its own: its output, and the names of the programs that it compiled."""
    model = tmp_path_factory.mktemp("models") / "model"
    lsjax.save(random_params(model_config(vocab_size=258, num_hidden_layers=1), 0), model)
    write_byte_tokenizer(model)

    def run(**environment):
        arguments = ["-m", "lsjax", "generate", "--model", model, "--prompt", "some text", "--max-new-tokens", "4"]
        found = python(*arguments, JAX_EXPLAIN_CACHE_MISSES="1", **environment)
        return found, re.findall(r"PERSISTENT COMPILATION CACHE MISS for '(\w+)'", found.stderr)

    return run


def test_a_second_run_of_the_command_compiles_nothing_again(generate, tmp_path):
    def programs():
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    first, compiled = generate(LSJAX_COMPILATION_CACHE=str(tmp_path))
    kept = programs()
    assert sorted(compiled) == sorted(name.rsplit("-", 2)[0] for name in kept)
    assert any("generate" in name for name in kept)
    second, compiled = generate(LSJAX_COMPILATION_CACHE=str(tmp_path))
    assert (compiled, programs(), second.stdout) == ([], kept, first.stdout)

    for path in tmp_path.iterdir():
        os.truncate(path, 1000)
    third, compiled = generate(LSJAX_COMPILATION_CACHE=str(tmp_path))
    assert (len(compiled), third.stdout) == (len(kept), first.stdout)
    assert third.stderr.count("trouble in reading") == 1
    assert all(path.stat().st_size > 1000 for path in tmp_path.iterdir())  # written anew
    assert programs().keys() == kept.keys()


def test_a_directory_that_cannot_be_made_is_done_without(generate, tmp_path):
    (tmp_path / "file").write_text("")
    found, _ = generate(XDG_CACHE_HOME=str(tmp_path / "file"))
    assert "warning" not in found.stderr
    assert found.stdout


def test_the_library_keeps_no_programs(tmp_path):
    code = "import jax, lsjax; lsjax.init; print(jax.config.jax_compilation_cache_dir)"
    assert python("-c", code, HOME=str(tmp_path)).stdout == "None\n"
