"""What a checkpoint can be, which of it exists, a selection that meets every pair, and README's table of it.

``python tests/matrix.py`` writes the table into README.md.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

README = Path(__file__).parents[1] / "README.md"
START, END = "<!-- the table of tests/matrix.py -->\n", "<!-- end of the table -->\n"


class Case(NamedTuple):
    """One checkpoint: where it stands, what the model has, how its weights are stored, who wrote its configuration."""

    source: str
    head: str
    biases: str
    head_dim: str
    stored: str
    config: str


AXES: dict[str, tuple[str, ...]] = {
    "source": (
        "safetensors, one file",
        "safetensors, shards",
        "PyTorch .bin, one file",
        "PyTorch .bin, shards",
        "hub id",
        "GGUF",
        "lsjax.save",
    ),
    "head": ("tied", "untied"),
    "biases": ("no biases", "attention biases", "attention and MLP biases"),
    "head_dim": ("derived head_dim", "explicit head_dim"),
    "stored": ("float32", "bfloat16", "float16", "Q8_0"),
    "config": ("v4 config", "v5 config", "its own"),
}

# Combinations that do not exist, and why.
GAPS = {
    "quantized": "quantized weights are read from GGUF files alone (of GGUF's other types, other tests)",
    "own": "a GGUF file has metadata for a config.json; `lsjax.save` writes one that transformers 4 and 5 both read",
}


def gap(case: Case) -> str:
    """The key of ``GAPS`` for a combination that does not exist; empty for one that does."""
    if case.stored == "Q8_0" and case.source != "GGUF":
        return "quantized"
    if (case.config == "its own") != (case.source in ("GGUF", "lsjax.save")):
        return "own"
    return ""


def every_case() -> list[Case]:
    """Every combination that exists."""
    return [case for case in itertools.starmap(Case, itertools.product(*AXES.values())) if not gap(case)]


def pairs(case: tuple[str, ...]) -> set[tuple[int, str, int, str]]:
    """Every two properties that a case has together."""
    found = itertools.combinations(enumerate(case), 2)
    return {(first, one, second, other) for (first, one), (second, other) in found}


def covering(cases: list[Any]) -> list[Any]:
    """Few of these cases, in which any two properties that one of them has together are: most new pairs first."""
    left = set().union(*map(pairs, cases))
    chosen = []
    while left:
        chosen.append(max(cases, key=lambda case: len(pairs(case) & left)))  # the first of equals
        left -= pairs(chosen[-1])
    return chosen


def model_of(case: Case) -> tuple[str, str, str]:
    """What makes a model's structure, and so a program of its own."""
    return case.head, case.biases, case.head_dim


def covering_cases() -> list[Case]:
    """Few cases with every pair that exists, of few models."""
    models = covering(list(itertools.product(AXES["head"], AXES["biases"], AXES["head_dim"])))
    return covering([case for case in every_case() if model_of(case) in models])


def table() -> str:
    """README's table: each source with each property, checked where a case has them together."""
    tested = set().union(*map(pairs, covering_cases()))
    shown = [(axis, value) for axis, values in enumerate(AXES.values()) for value in values]
    columns = [(axis, value) for axis, value in shown if axis and value != "its own"]
    lines = ["| source | " + " | ".join(value for _, value in columns) + " |", "|---" + "|:-:" * len(columns) + "|"]
    notes: list[str] = []
    for source in AXES["source"]:
        cells = []
        for axis, value in columns:
            if (0, source, axis, value) in tested:
                cells.append("✓")
                continue
            (reason,) = {gap(case) for case in _changed(source, axis, value)}
            notes += [] if GAPS[reason] in notes else [GAPS[reason]]
            cells.append(f"no <sup>{notes.index(GAPS[reason]) + 1}</sup>")
        lines.append(f"| {source} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {note[0].upper()}{note[1:]}." for number, note in enumerate(notes, start=1))]
    return "\n".join(lines) + "\n"


def _changed(source: str, axis: int, value: str) -> list[Case]:
    """The cases of a source with one property changed."""
    return [case._replace(**{Case._fields[axis]: value}) for case in every_case() if case.source == source]


def with_table(readme: str) -> str:
    """README with the table as it is now."""
    before, rest = readme.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text(encoding="utf-8")), encoding="utf-8")
