"""Options of the commands that write text: how tokens are drawn, and what ends a text."""

from __future__ import annotations

import argparse
from typing import Any

from lsjax.cli.parser import Parser, UsageError, at_least, number

_DRAWING = ("temperature", "top_k", "top_p", "min_p", "seed")


def add_text_options(parser: Parser) -> None:
    """Adds ``--temperature``, ``--top-k``, ``--top-p``, ``--min-p``, ``--seed`` and ``--stop``."""
    parser.add_argument(
        "--temperature",
        type=number("a number of at least 0", lambda x: x >= 0),
        metavar="T",
        help="draw tokens instead of taking the most probable ones, at this temperature; 0 is greedy",
    )
    parser.add_argument(
        "--top-k", type=at_least(1), metavar="N", help="draw from the N most probable tokens (at temperature 1, or T)"
    )
    parser.add_argument(
        "--top-p",
        type=number("a number above 0, at most 1", lambda x: 0 < x <= 1),
        metavar="P",
        help="draw from the most probable tokens that together have the probability P",
    )
    parser.add_argument(
        "--min-p",
        type=number("a number in 0..1", lambda x: 0 <= x <= 1),
        metavar="P",
        help="draw from the tokens that are at least P times as probable as the most probable one",
    )
    parser.add_argument(
        "--seed", type=at_least(0), metavar="N", help="draw with this seed: the same one, the same text (default: 0)"
    )
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the text before this one, wherever it falls; may be repeated",
    )


def drawing_options(options: argparse.Namespace) -> dict[str, Any]:
    """The given ones of how tokens are drawn, by name; none of them: greedily."""
    return {name: value for name in _DRAWING if (value := getattr(options, name)) is not None}


def drawing(options: argparse.Namespace) -> dict[str, Any]:
    """How tokens are drawn, as ``lsjax.generate`` takes it."""
    given = drawing_options(options)
    if not given:
        return {}
    import jax

    seed = given.pop("seed", 0)
    return given | {"key": jax.random.key(seed)}


def check_stops(options: argparse.Namespace, tokenizer: Any) -> None:
    """That what ``--stop`` gives can end a text of this tokenizer's."""
    from lsjax.text.stopping import read_stops

    try:
        read_stops(options.stop, tokenizer)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
