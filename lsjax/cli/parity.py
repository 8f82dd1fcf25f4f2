"""``lsjax parity``: compares a checkpoint's modules, logits and greedy text with transformers' in torch."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import Any

from lsjax.cli.parser import Parser, at_least, positive, prompt_text, usage_errors


def make_parser() -> Parser:
    """The parser of ``lsjax parity``."""
    parser = Parser(
        prog="lsjax parity",
        description="Runs a checkpoint in lsjax and in transformers (torch), both in float32 on the CPU, and prints\n"
        "the largest difference of each kind of module, of the logits at some depths, and of the greedy\n"
        "text, autoregressive and self-speculative. Needs torch (the extra 'torch').",
        epilog="examples:\n"
        "  lsjax parity demo --depths 4,17,30\n"
        "  lsjax parity ./checkpoint --exit-layer 4 --prompt 'The capital of France is' --json\n\n"
        "exit status: 0, or 1 where a difference is past its tolerance, or 2 for wrong usage.",
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a directory in Hugging Face layout, a .gguf file, a model's name on the Hugging Face hub, or 'demo'",
    )
    parser.add_argument(
        "--depths",
        type=_depths,
        metavar="D,D,...",
        help="numbers of layers to compare logits at (default: one, half of them, all, and --exit-layer)",
    )
    parser.add_argument(
        "--exit-layer",
        type=at_least(1),
        metavar="E",
        help="layers that draft for the self-speculative text (default: a quarter of them)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        type=prompt_text,
        metavar="TEXT",
        help="a text to compare on, or '-' for standard input; may be repeated (default: a few built-in prompts, or "
        "random ids where the checkpoint has no tokenizer)",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=at_least(0),
        default=32,
        metavar="N",
        help="new tokens of each text to compare; 0: none (default: %(default)s)",
    )
    parser.add_argument(
        "--tolerance",
        type=positive,
        metavar="X",
        help="the largest relative error of modules and logits (default: 1e-4), relative to the number's own size "
        "plus the standard deviation of what torch gives; texts may only part at a tie, whatever X is",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs ``lsjax parity`` and returns its exit status."""
    options = make_parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Only now JAX, torch and what builds on them, so that help and wrong usage answer at once.
    from lsjax.cli.session import note
    from lsjax.measure.parity import parity

    tolerances: Any = {} if options.tolerance is None else dict.fromkeys(_TOLERANCES, options.tolerance)
    note(f"loading {options.source} twice and comparing")
    with usage_errors(options.source, ValueError, OSError, ImportError):
        report = parity(
            options.source,
            prompts=options.prompt,
            depths=options.depths,
            exit_layer=options.exit_layer,
            max_new_tokens=options.max_new_tokens,
            **tolerances,
        )
    print(json.dumps({"model": options.source} | report.to_dict()) if options.json else report)
    return 0 if report.ok else 1


_TOLERANCES = ("module_tolerance", "logits_tolerance")


def _depths(text: str) -> list[int]:
    try:
        return [at_least(1)(part.strip()) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected numbers of layers such as 4,8,16, got {text!r}") from None
