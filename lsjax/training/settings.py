"""A training as a TOML file says it: every table is one of this package's dataclasses, checked by it."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from lsjax.checks import check_choice, check_int, check_number
from lsjax.config import LlamaConfig
from lsjax.training.checkpoint import WHICH
from lsjax.training.loop import Watch
from lsjax.training.recipe import Recipe

Table = TypeVar("Table")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """What to learn from.

    Attributes:
        files: of :func:`~lsjax.training.documents.read_documents`.
        held_out_files: likewise, to look at the model with; none: a part of ``files`` is held out.
        held_out: so large a part, in 0..1.
        sequence_length: tokens of a row.

    Raises:
        ValueError: says what was expected and what came.
    """

    files: tuple[str, ...]
    held_out_files: tuple[str, ...] = ()
    held_out: float = 0.02
    sequence_length: int = 512

    def __post_init__(self) -> None:
        for name in ("files", "held_out_files"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(item, str) for item in given):
                raise ValueError(f"{name}: expected a list of paths, got {given!r}")
            object.__setattr__(self, name, tuple(given))
        if not self.files:
            raise ValueError("files: expected at least one path, got none")
        check_number("held_out", self.held_out, 0, 1)
        check_int("sequence_length", self.sequence_length, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole training.

    Attributes:
        out: its directory.
        init: what ``lsjax.load`` takes, to start from; None: random weights, by ``model``.
        tokenizer: what :func:`~lsjax.text.tokenizer.load_tokenizer` takes; None: that of ``init``. Without either, only
            ids can be read.
        model: entries of a ``config.json``, for random weights. Vocabulary size and special ids are the tokenizer's,
            and positions those of a row, where they are not given.
        result: which parameters become the result: ``"last"`` or ``"best"``, with the least held-out loss.
        data: what to learn from.
        recipe: how.
        watch: what to look at on the way.

    Raises:
        ValueError: says what was expected and what came.
    """

    out: str
    init: str | None = None
    tokenizer: str | None = None
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    result: str = "last"
    data: Data
    recipe: Recipe
    watch: Watch = dataclasses.field(default_factory=Watch)

    def __post_init__(self) -> None:
        for name in ("out", "init", "tokenizer"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and not (name != "out" and value is None):
                raise ValueError(f"{name}: expected a text, got {value!r}")
        check_choice("result", self.result, WHICH)
        if self.init is not None and self.model:
            raise ValueError("model: expected either init, a model to start from, or model, the shape of a new one")
        if self.init is None and not self.model:
            raise ValueError("expected init, a model to start from, or a table [model], the shape of a new one")

    def config(self, tokenizer: Any) -> LlamaConfig:
        """The configuration of a new model.

        Args:
            tokenizer: of transformers, or None.

        Raises:
            ValueError: entries of ``model`` that no Llama has.
        """
        given: dict[str, Any] = {"max_position_embeddings": self.data.sequence_length}
        if tokenizer is not None:
            given["vocab_size"] = len(tokenizer)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                given[name] = getattr(tokenizer, name)
        known = {field.name for field in dataclasses.fields(LlamaConfig)}
        if unknown := sorted(set(self.model) - known):
            raise ValueError(f"model: expected entries of a Llama's configuration, got {', '.join(unknown)}")
        return LlamaConfig(**given | dict(self.model))


def read_settings(path: Path, **changes: Any) -> Settings:
    """A training's settings from a TOML file; paths in it are relative to its directory.

    Args:
        path: the file.
        changes: entries of the top level that replace the file's; None: they do not. Paths are as they are.

    Raises:
        ValueError: no such file, no TOML, an entry that there is none of, or one with a wrong value, by its name.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"expected a TOML file ({error})") from error

    def located(value: Any) -> Any:
        """A path as this process finds it; a hub id, and what is no text, as it is."""
        if isinstance(value, list):
            return [located(item) for item in value]
        return str(path.parent / Path(value).expanduser()) if isinstance(value, str) and value else value

    for name in ("init", "tokenizer"):
        if isinstance(table.get(name), str) and (path.parent / Path(table[name]).expanduser()).exists():
            table[name] = located(table[name])
    if "out" in table:
        table["out"] = located(table["out"])
    if isinstance(table.get("data"), dict):
        table["data"] |= {
            name: located(table["data"][name]) for name in ("files", "held_out_files") if name in table["data"]
        }
    return build(Settings, table | {name: value for name, value in changes.items() if value is not None})


def build(kind: type[Table], table: Any, name: str = "") -> Table:
    """A dataclass out of a table, its fields that are dataclasses out of tables in it.

    Args:
        kind: a dataclass.
        table: a dictionary of its fields.
        name: the table's own, for errors.

    Raises:
        ValueError: an unknown or missing entry, or one that the dataclass refuses.
    """
    if not isinstance(table, dict):
        raise ValueError(f"{name}: expected a table, got {table!r}")
    hints, fields = typing.get_type_hints(kind), {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    prefix = f"{name}." if name else ""
    if unknown := [entry for entry in table if entry not in fields]:
        raise ValueError(f"{prefix}{unknown[0]}: there is no such entry; expected one of {', '.join(fields)}")
    given = {}
    for entry, value in table.items():
        nested = _dataclass_in(hints[entry])
        given[entry] = value if nested is None else build(nested, value, prefix + entry)
    required = [
        entry
        for entry, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing := [entry for entry in required if entry not in given]:
        raise ValueError(f"{prefix}{missing[0]}: expected an entry, found none")
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from error


def _dataclass_in(hint: Any) -> type | None:
    """The dataclass that a field holds, or may hold."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    return next((option for option in options if dataclasses.is_dataclass(option)), None)  # type: ignore[return-value]
