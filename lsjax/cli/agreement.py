"""``lsjax agreement``: how often each layer names the whole model's token, and what an exit there would give."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lsjax.cli.generate import DTYPES
from lsjax.cli.parser import Parser, at_least, prompts_file, usage_errors


def make_parser() -> Parser:
    """The parser of ``lsjax agreement``."""
    parser = Parser(
        prog="lsjax agreement",
        description="Lets the model continue some prompts and prints, for each layer, how often it already names the\n"
        "token that the whole model picks, which drafts an exit there would have had accepted (exactly, by\n"
        "replaying the rounds), and a rough estimate of the speed-up. Look at it before choosing --exit-layer.",
        epilog="examples:\n"
        "  lsjax agreement demo\n"
        "  lsjax agreement ./checkpoint --prompts questions.txt --chat --num-speculations 6 --plot layers.png\n"
        "  lsjax agreement ./checkpoint --prompts articles.jsonl --max-new-tokens 0\n\n"
        "exit status: 0, or 2 for wrong usage.",
    )
    parser.add_argument(
        "source", metavar="SRC", help="a directory, a .gguf file, a model's name on the Hugging Face hub, or 'demo'"
    )
    parser.add_argument(
        "--prompts",
        type=prompts_file,
        metavar="FILE",
        help='one prompt a line; in a .jsonl file {"prompt": "..."} or {"tokens": [ids]} (default: a few built-in)',
    )
    parser.add_argument(
        "--num-speculations", type=at_least(0), default=4, metavar="K", help="drafts a round (default: %(default)s)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=at_least(0),
        default=64,
        metavar="N",
        help="tokens that the model writes after each prompt; 0: measure the prompts' own text (default: %(default)s)",
    )
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument(
        "--dtype", choices=DTYPES, metavar="NAME", help=f"the weights' type: {', '.join(DTYPES)} (default: the file's)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument(
        "--plot", type=_picture, metavar="PNG", help="also draw the table (needs matplotlib, the extra 'plot')"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs ``lsjax agreement`` and returns its exit status."""
    options = make_parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that torch is absent
    # Only now JAX and what builds on it, so that help and wrong usage answer at once.
    from lsjax.cli.session import encode_prompts, long_capacity, note
    from lsjax.io import load
    from lsjax.measure.agreement import agreement
    from lsjax.text.prompts import PROMPTS, pad_rows

    draw: Any = None
    if options.plot is not None:
        with usage_errors("--plot", ImportError):
            from lsjax.measure.plot import draw
    note(f"loading {options.source}")
    with usage_errors(options.source, ValueError, OSError, ImportError):
        prompts = list(PROMPTS) if options.prompts is None else options.prompts
        rows = encode_prompts(options.source, prompts, chat=options.chat)
        params = load(options.source, dtype=options.dtype)
    tokens, lengths = pad_rows(rows)
    capacity = long_capacity(params.config, tokens.shape[1] + options.max_new_tokens)
    note("compiling, generating and measuring")
    with usage_errors("--prompts", ValueError):
        found = agreement(
            params,
            tokens,
            prompt_lengths=lengths,
            max_new_tokens=options.max_new_tokens,
            num_speculations=options.num_speculations,
            capacity=capacity,
        )
    if options.plot is not None:
        title = f"{options.source} ({params.dtype})"
        with usage_errors(f"--plot {options.plot}", OSError):
            draw(found, title).savefig(options.plot)
    about = {"model": options.source, "dtype": str(params.dtype), "max_new_tokens": options.max_new_tokens}
    print(json.dumps(about | found.to_dict()) if options.json else found)
    return 0


def _picture(name: str) -> Path:
    path = Path(name)
    if path.suffix.lower() != ".png":
        raise argparse.ArgumentTypeError(f"expected a file name that ends in .png, got {name!r}")
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in an existing directory, got {name!r}")
    return path
