"""What the benchmarks share: their options, the machine's description, and where results go."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

import lsjax

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OURS, THEIRS, BOUND = "#1f5a96", "#c2571a", "0.45"
TEXT = (
    "The lighthouse keeper wrote the weather into his book every evening, the wind first, then the clouds, and last "
    "of all the ships that had passed. In forty years he had missed no day. When the young engineer came to replace "
    "the lamp by one that needed nobody, she read the books for a week before she opened her tools, and then she "
    "asked him what he would do."
)


def parser(description: str | None, several_models: bool = False) -> argparse.ArgumentParser:
    """An argument parser with the options of every benchmark."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if several_models:
        found.add_argument("--model", default=["demo"], nargs="+")
    else:
        found.add_argument("--model", default="demo")
    found.add_argument("--repetitions", type=int, default=5)
    found.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="directory of the results")
    return found


def prompts(model: str, config: lsjax.LlamaConfig, batch: int, length: int) -> np.ndarray:
    """int32 ``[batch, length]``: pieces of one text; random ids where the model has no tokenizer."""
    from lsjax.text.tokenizer import load_tokenizer

    try:
        ids = load_tokenizer(model)(TEXT)["input_ids"]
    except (OSError, ValueError):
        ids = np.random.default_rng(0).integers(0, config.vocab_size, 101).tolist()
    return np.array([np.resize(np.roll(ids, -7 * row), length) for row in range(batch)], np.int32)


class Progress:
    """A bar on stderr over the calls of :func:`lsjax.measure.time_in_turns`."""

    def __init__(self, total: int) -> None:
        from tqdm import tqdm  # here, so that benchmarks/gpu.py needs only JAX's own packages

        self._bar = tqdm(total=total, unit="run", disable=None)

    def __call__(self, name: Any, repetition: int) -> None:
        self._bar.set_description(f"{' '.join(map(str, name)) if isinstance(name, tuple) else name} #{repetition}")
        self._bar.update()


def describe() -> dict[str, Any]:
    """When, where and with what."""
    packages = {}
    for name in ("jax", "jaxlib", "flax", "torch", "transformers", "numpy"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind if jax.default_backend() != "cpu" else _cpu(),
        "python": platform.python_version(),
        "lsjax": lsjax.__version__,
        "packages": packages,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _cpu() -> str:
    """The CPU as the system names it, and the instructions that decide about products."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    flags = facts.get("flags", "").split()
    known = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags]
    return f"{facts.get('model name', platform.machine())}, {os.cpu_count()} cores, {' '.join(known)}"


def write(directory: Path, name: str, results: dict[str, Any], table: str, figure: Figure | None = None) -> None:
    """``name.json``, ``name.md`` and ``name.png``, each whole or not at all; the table also on stdout."""
    directory.mkdir(parents=True, exist_ok=True)
    print(table)
    found = describe()
    note = f"`{found['command']}`, {found['date']}, {found['device']}, jax {found['packages']['jax']}"
    _replace(directory / f"{name}.json", lambda path: path.write_text(json.dumps(found | results, indent=1) + "\n"))
    _replace(directory / f"{name}.md", lambda path: path.write_text(f"{table}\n\n{note}\n"))
    if figure is not None:
        _replace(directory / f"{name}.png", lambda path: figure.savefig(path, format="png", dpi=110))


def _replace(path: Path, fill: Any) -> None:
    part = path.with_name(path.name + ".part")
    fill(part)
    part.replace(path)


def to_table(header: list[str], rows: list[list[Any]]) -> str:
    """A table in Markdown; numbers as they are given."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
