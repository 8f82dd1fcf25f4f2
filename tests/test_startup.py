"""What a start costs: which modules are imported, and which programs are compiled again."""

import os
import subprocess
import sys

import pytest
from checkpoints import model_config, write_byte_tokenizer
from support import random_params

import lsjax
from lsjax.cli import launch

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


def test_every_public_name_is_there():
    assert set(lsjax.__all__) <= set(dir(lsjax))
    assert {name: getattr(lsjax, name).__module__ for name in lsjax._HOMES} == lsjax._HOMES
    assert set(lsjax.__all__) == {*lsjax._HOMES, "measure"}
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
    assert default.is_dir()
    elsewhere = tmp_path / "elsewhere"
    assert settings(XDG_CACHE_HOME=elsewhere)["JAX_COMPILATION_CACHE_DIR"] == f"{elsewhere}/lsjax/compilation"
    assert settings(LSJAX_COMPILATION_CACHE=elsewhere)["JAX_COMPILATION_CACHE_DIR"] == str(elsewhere)
    assert "JAX_COMPILATION_CACHE_MAX_SIZE" not in settings(JAX_COMPILATION_CACHE_MAX_SIZE="5")  # the user's own
    for off in ("", "0", "off"):
        assert settings(LSJAX_COMPILATION_CACHE=off) == {}
    assert settings(JAX_COMPILATION_CACHE_DIR="/theirs") == {}
    assert capsys.readouterr().err == ""


def test_a_directory_that_cannot_be_written_is_done_without(settings, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert settings(XDG_CACHE_HOME=tmp_path / "file") == {}
    assert capsys.readouterr().err == ""
    assert settings(LSJAX_COMPILATION_CACHE=tmp_path / "file") == {}
    assert "no cache there" in capsys.readouterr().err


def test_a_second_run_of_the_command_compiles_nothing_again(tmp_path):
    model, cache = tmp_path / "model", tmp_path / "cache"
    lsjax.save(random_params(model_config(vocab_size=258), 0), model)
    write_byte_tokenizer(model)
    arguments = ["-m", "lsjax", "generate", "--model", model, "--prompt", "some text", "--max-new-tokens", "4"]

    def programs():
        return sorted(path.name for path in cache.glob("*-cache"))

    first = python(*arguments, LSJAX_COMPILATION_CACHE=str(cache))
    kept = programs()
    assert any("generate" in name for name in kept)
    second = python(*arguments, LSJAX_COMPILATION_CACHE=str(cache))
    assert programs() == kept
    assert second.stdout == first.stdout
