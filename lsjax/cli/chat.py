"""``lsjax chat``: talk with a model, which keeps what it has read between turns."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lsjax.cli.generate import DTYPES, STRATEGIES, check_strategy
from lsjax.cli.parser import Parser, at_least
from lsjax.cli.text_options import add_text_options


def make_parser() -> Parser:
    """The parser of ``lsjax chat``."""
    parser = Parser(
        prog="lsjax chat",
        description="Talks with a Llama through its chat template, a line a turn. Answers appear as they are written:\n"
        "with --exit-layer E, accepted drafts in green and the model's own tokens in magenta. Each turn\n"
        "reads only what is new, and ends with its statistics on standard error.",
        epilog="while it runs:\n"
        "  /reset           forget all that was said but the system message\n"
        "  /exit, Ctrl-D    leave\n"
        "  Ctrl-C           end the answer\n\n"
        "examples:\n"
        "  lsjax chat --model demo --system 'Answer in one sentence.'\n"
        "  lsjax chat --model facebook/layerskip-llama3-8B --dtype bfloat16 --exit-layer 4 --temperature 0.7\n\n"
        "exit status: 0, or 2 for wrong usage.",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="SRC",
        help="a directory, a .gguf file, a model's name on the Hugging Face hub, or 'demo'",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message in front of the conversation")
    parser.add_argument(
        "--exit-layer",
        type=at_least(1),
        metavar="E",
        help="draft with the first E layers, from 1 to all of the model's; without it nothing is drafted",
    )
    parser.add_argument(
        "--num-speculations", type=at_least(0), metavar="K", help="tokens drafted before each check (default: 4)"
    )
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        metavar="NAME",
        help="as of 'lsjax generate': self_speculative (the default with --exit-layer), early_exit or autoregressive",
    )
    parser.add_argument(
        "--max-new-tokens",
        type=at_least(1),
        default=512,
        metavar="N",
        help="end an answer after N tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--capacity",
        type=at_least(2),
        metavar="N",
        help="tokens that the conversation may come to (default: what the model was trained for, at most 4096)",
    )
    add_text_options(parser)
    parser.add_argument(
        "--dtype", choices=DTYPES, metavar="NAME", help=f"the weights' type: {', '.join(DTYPES)} (default: the file's)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs ``lsjax chat`` and returns its exit status."""
    options = make_parser().parse_args(argv)
    check_strategy(options)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that torch is absent
    from lsjax.cli import repl

    return repl.run(options)
