"""``lsjax inspect``: what a checkpoint is and whether it would load, from its headers alone."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lsjax.cli.parser import Parser, human_bytes, usage_errors

if TYPE_CHECKING:
    from lsjax.convert.inspection import Inspection

_MOST_FILES = 8
_MOST_PROBLEMS = 20


def make_parser() -> Parser:
    """The parser of ``lsjax inspect``."""
    parser = Parser(
        prog="lsjax inspect",
        description="Says what a checkpoint is: family, sizes, tensors, files, and everything that would keep it from\n"
        "loading or that is odd about it. Only headers are read, so it is quick whatever the size.",
        epilog="examples:\n"
        "  lsjax inspect ./checkpoint\n"
        "  lsjax inspect model.gguf --all\n"
        "  lsjax inspect demo --json\n\n"
        "exit status: 0, or 1 where the checkpoint would not load, or 2 for wrong usage.",
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a directory in Hugging Face layout or written by lsjax, a .gguf file, a model's name on the Hugging Face "
        "hub (its weights are fetched), or 'demo'",
    )
    parser.add_argument("--all", action="store_true", help="list every tensor, not one line for all layers' alike")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs ``lsjax inspect`` and returns its exit status."""
    options = make_parser().parse_args(argv)
    from lsjax.convert.checkpoint import one_line
    from lsjax.convert.inspection import stored_dtype
    from lsjax.io import inspect

    with usage_errors(options.source, ValueError, OSError, ImportError):
        found = inspect(options.source)
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        rows = [(tensor.name, f"{list(tensor.shape)}", stored_dtype(tensor)) for tensor in found.tensors]
        for line in _describe(found, rows if options.all else _fold(rows)):
            print(one_line(line))  # names and values come from the file
    return 0 if found.loads else 1


def _describe(found: Inspection, rows: list[tuple[str, str, str]]) -> Iterator[str]:
    yield f"{found.where}: {found.family or 'unknown family'}, {found.format or 'no weights'}"
    if found.tensors:
        dtypes = ", ".join(f"{count} {name}" for name, count in found.dtypes.items())
        yield (
            f"{found.num_parameters:,} parameters, {human_bytes(found.num_bytes)} in {len(found.tensors)} tensors "
            f"({dtypes})"
        )
    if found.config:
        yield ""
        yield from _config_lines(found.config)
    if rows:
        yield ""
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        yield from (f"{name:{widths[0]}}  {shape:{widths[1]}}  {dtype}" for name, shape, dtype in rows)
    yield ""
    yield from _file_lines(found.files)
    for title, lines, most in (("note", found.notes, None), ("problem", found.problems, _MOST_PROBLEMS)):
        if lines:
            yield ""
            yield from (f"{title}: {line}" for line in lines[:most])
            if most and len(lines) > most:
                yield f"and {len(lines) - most} problems more (--json lists all)"
    yield ""
    yield "lsjax loads it, as far as its headers tell." if found.loads else "lsjax does not load it."


def _config_lines(config: dict[str, Any]) -> Iterator[str]:
    """Entries, several in a line."""
    line = ""
    for name, value in config.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        part = f"{name} {text if len(text) <= 160 else text[:157] + '...'}"
        if line and len(line) + len(part) > 100:
            yield line
            line = ""
        line += f"{', ' if line else ''}{part}"
    yield line


def _fold(rows: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """One row for the tensors of all layers that differ in the layer's number alone."""
    layers: dict[tuple[str, str, str], list[int]] = collections.defaultdict(list)
    for name, shape, dtype in rows:
        found = re.search(r"(?<=[._])\d+(?=[./])", name)
        template = name if found is None else f"{name[: found.start()]}{{}}{name[found.end() :]}"
        layers[template, shape, dtype] += [] if found is None else [int(found[0])]
    return [
        (template.replace("{}", _ranges(numbers)) if numbers else template, shape, dtype)
        for (template, shape, dtype), numbers in layers.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``{0-2,5}``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return "{" + ",".join("-".join(map(str, part)) for part in parts) + "}"


def _file_lines(files: dict[str, int]) -> Iterator[str]:
    """The files with their sizes; numbered shards as one line."""
    shards = [name for name in files if re.search(r"-\d+-of-\d+\.", name)]
    if len(shards) > 2:
        total = human_bytes(sum(files[name] for name in shards))
        yield f"{total:>9}  {shards[0]} ... {shards[-1]} ({len(shards)} files)"
        files = {name: size for name, size in files.items() if name not in shards}
    largest = sorted(files, key=lambda name: -files[name])
    for name in largest[:_MOST_FILES]:
        yield f"{human_bytes(files[name]):>9}  {name}"
    if rest := largest[_MOST_FILES:]:
        yield f"{human_bytes(sum(files[name] for name in rest)):>9}  {len(rest)} files more"
