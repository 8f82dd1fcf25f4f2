"""The repository's own set-up: what is packaged, and that the linters see all of it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_package_is_packaged():
    folders = {path.parent.relative_to(ROOT) for path in ROOT.glob("lsjax/**/__init__.py")}
    folders |= {Path("lsjax") / path.parent.relative_to(ROOT) for path in ROOT.glob("convert/**/__init__.py")}
    assert set(SETTINGS["tool"]["setuptools"]["packages"]) == {".".join(folder.parts) for folder in folders}


def test_the_link_for_tools_leads_to_convert():
    assert (ROOT / "lsjax" / "convert").resolve() == ROOT / "convert"


@pytest.fixture
def copy(tmp_path):
    """The package and its settings, to be spoilt."""
    for name in ("lsjax", "convert"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def run(command: list[str], folder: Path) -> tuple[int, str]:
    quiet = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}  # it would look for newer versions
    result = subprocess.run(command, cwd=folder, env=quiet, capture_output=True, text=True, check=False, timeout=300)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.skipif(not importlib.util.find_spec("importlinter"), reason="needs the extra dev")
@pytest.mark.parametrize(
    ("file", "statement", "finding"),
    [
        ("convert/names.py", "from lsjax.io import load", "lsjax.convert is not allowed to import lsjax.io"),
        ("lsjax/params.py", "import lsjax.convert.names", "lsjax.params is not allowed to import lsjax.convert"),
        ("lsjax/io.py", "from lsjax import generate", "lsjax.io is not allowed to import lsjax:"),
        ("lsjax/io.py", "import lsjax.cli", "lsjax.io is not allowed to import lsjax.cli"),
        ("convert/names.py", "import torch", "lsjax.convert.names -> torch"),
        ("lsjax/utils.py", "import math", "lsjax.utils"),
    ],
)
def test_rooms_are_held_apart(copy, file, statement, finding):
    with (copy / file).open("a") as source:
        source.write(f"\n{statement}\n")
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    status, output = run([*command, "--no-cache"], copy)
    assert status == 1
    assert finding in output


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("pyright"), reason="needs the extra dev")
def test_types_are_checked_across_convert(copy):
    for path in (copy / "lsjax", copy / "convert"):
        for file in path.rglob("*.py"):
            file.unlink()  # all that would only take time to check
    (copy / "lsjax" / "io.py").write_text("from lsjax.convert.names import probe\n\nlength: str = probe(1)\n")
    (copy / "convert" / "names.py").write_text("def probe(text: str) -> int:\n    return text\n")
    for folder in ("tests", "examples", "benchmarks"):
        (copy / folder).mkdir()
    _, output = run([sys.executable, "-m", "pyright"], copy)
    assert 'io.py:3:21 - error: Argument of type "Literal[1]"' in output
    assert 'io.py:3:15 - error: Type "int" is not assignable to declared type "str"' in output
    assert 'Type "str" is not assignable to return type "int"' in output
