"""What a training writes about itself: ``run.json``, what is trained, and ``log.jsonl``, how it went."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from lsjax.config import LlamaConfig
from lsjax.training.packing import Rows
from lsjax.training.recipe import Recipe

RUN, LOG, CHECKPOINTS = "run.json", "log.jsonl", "checkpoints"
PICTURES = ("loss.png", "agreement.png", "drafts.png")


def write_run(directory: Path, run: Mapping[str, Any]) -> None:
    """Writes what is trained, whole or not at all."""
    _replace(directory / RUN, json.dumps(run, indent=2) + "\n")


def read_run(directory: Path) -> dict[str, Any] | None:
    """What is trained in a directory; None where nothing is.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        text = (directory / RUN).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{directory / RUN}: expected JSON ({error})") from error
    return found


def read_config(directory: Path) -> LlamaConfig:
    """The configuration of the model that is trained in a directory.

    Raises:
        FileNotFoundError: nothing is.
    """
    run = read_run(directory)
    if run is None:
        raise FileNotFoundError(f"{directory}: expected the directory of a training, found no {RUN}")
    return LlamaConfig.from_dict(run["model"])


def differences(old: Any, new: Any, name: str = "") -> list[str]:
    """What differs between two trees of JSON, one line each: ``recipe.steps: 200, now 400``."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = dict.fromkeys((*old, *new))
        parts = [differences(old.get(key), new.get(key), f"{name}.{key}" if name else key) for key in names]
        return [line for part in parts for line in part]
    return [] if old == new else [f"{name}: {json.dumps(old)}, now {json.dumps(new)}"]


def describe(recipe: Recipe, config: LlamaConfig, rows: Rows, held_out: Rows) -> dict[str, Any]:
    """What is trained, for ``run.json``."""

    def data(part: Rows) -> dict[str, Any]:
        return {
            "rows": len(part),
            "length": part.tokens.shape[1],
            "labels": part.num_labels,
            "sha256": part.fingerprint,
        }

    return {
        "model": config.to_dict(),
        "recipe": dataclasses.asdict(recipe),
        "data": data(rows),
        "held_out": data(held_out),
        "packages": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
    }


def check_same(directory: Path, run: dict[str, Any]) -> None:
    """That a directory's training is this one; packages may be others."""
    old, new = (
        {name: value for name, value in given.items() if name != "packages"}
        for given in (read_run(directory) or {}, json.loads(json.dumps(run)))
    )
    if lines := differences(old, new):
        raise ValueError(f"{directory} holds another training, which cannot go on as this one:\n" + "\n".join(lines))


def forget_training(directory: str | os.PathLike[str]) -> None:
    """Removes what :func:`~lsjax.training.loop.train` wrote into a directory, and nothing else."""
    directory = Path(directory).expanduser()
    if read_run(directory) is None:
        return
    for name in (LOG, *PICTURES):
        (directory / name).unlink(missing_ok=True)
    shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)
    (directory / RUN).unlink()  # last, so that an interrupted removal can be done again


class Log:
    """A file of JSON lines, each with its ``kind`` and the ``step`` after which it was written.

    Args:
        directory: of the training.
        step: where the training goes on; what was written after it is forgotten, as is a line torn by a kill.
    """

    def __init__(self, directory: Path, step: int) -> None:
        path = directory / LOG
        kept = [entry for entry in read_log(directory) if entry["step"] <= step]
        _replace(path, "".join(_line(entry) for entry in kept))
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Adds a line, which a reader sees at once."""
        self._file.write(_line({"kind": kind, "step": step, **values}))
        self._file.flush()

    def bring_to_disk(self) -> None:
        """Waits until all lines are there whatever happens."""
        os.fsync(self._file.fileno())


def read_log(directory: Path) -> list[dict[str, Any]]:
    """The lines of a training's log, in their order; none where there is no log.

    A line that is torn, by a kill while it was written, ends them.
    """
    try:
        text = (directory / LOG).read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    found = []
    for line in text.split("\n")[:-1]:
        try:
            entry = json.loads(line)
            entry["step"] = int(entry["step"])
        except (ValueError, KeyError, TypeError):
            break
        found.append(entry)
    return found


def _line(entry: Mapping[str, Any]) -> str:
    return json.dumps({name: _plain(value) for name, value in entry.items()}) + "\n"


def _plain(value: Any) -> Any:
    """Numbers that JSON does not have are None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _replace(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
