"""What the subcommands' parsers share: one-line errors and the types of arguments."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

_MOST_LINES = 6  # of a long error, such as one that lists every tensor of a broken checkpoint


class UsageError(Exception):
    """Wrong usage: the dispatcher prints it in one line and exits with status 2."""

    def __init__(self, message: str) -> None:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        if len(lines) > _MOST_LINES:
            lines = [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} more"]
        super().__init__("; ".join(lines).replace(":;", ":"))


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are :class:`UsageError`, and whose help keeps its line breaks."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Argparse's hook for wrong usage."""
        raise UsageError(f"{message} (see '{self.prog} --help')")


@contextlib.contextmanager
def usage_errors(about: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns exceptions of these kinds into :class:`UsageError`, ``about`` in front."""
    try:
        yield
    except kinds as error:
        raise UsageError(f"{about}: {error or type(error).__name__}") from error


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number of at least ``least``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
        return value

    return read


def byte_count(text: str) -> int:
    """The type of an argument that is a number of bytes, such as ``5GB``, ``500MB`` or ``4096``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", text.strip().lower())
    value = int(float(found[1]) * 1000 ** " kmgt".index(found[2] or " ")) if found else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 500MB, got {text!r}")
    return value


def human_bytes(count: int) -> str:
    """``1_610_612_736`` as ``1.61 GB``."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"
    return f"{count} B"


def number(expected: str, is_good: Callable[[float], bool]) -> Callable[[str], float]:
    """The type of an argument that is a finite number, such as ``"a number above 0"``."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and is_good(value)):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return read


positive = number("a number above 0", lambda x: x > 0)


def prompt_text(text: str) -> str:
    """The type of a prompt: itself, or all of standard input for ``-``."""
    return _prompt(sys.stdin.read().removesuffix("\n") if text == "-" else text)


def prompt_file(name: str) -> str:
    """The type of a file that holds one prompt in UTF-8; the line break at its end is no part of the prompt."""
    try:
        return _prompt(Path(name).read_text(encoding="utf-8").removesuffix("\n"))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected a text file in UTF-8, got {name!r} ({error})") from error


def prompts_file(name: str) -> list[str | list[int]]:
    """The type of a file of prompts; see :func:`lsjax.text.prompts.read_file`."""
    from lsjax.text.prompts import read_file

    try:
        return read_file(name)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _prompt(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected a prompt, got an empty text")
    return text
