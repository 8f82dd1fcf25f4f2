"""``lsjax generate``: continues prompts, one batch however many there are."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from lsjax.cli.parser import Parser, UsageError, at_least, prompt_file, prompt_text
from lsjax.cli.text_options import add_text_options, drawing_options

DTYPES = ("float32", "bfloat16", "float16")
STRATEGIES = ("self_speculative", "early_exit", "autoregressive")


def make_parser() -> Parser:
    """The parser of ``lsjax generate``."""
    parser = Parser(
        prog="lsjax generate",
        description="Continues prompts with a Llama. With --exit-layer E its first E layers draft a few tokens and\n"
        "the other layers check them all at once: the text is the one that the whole model writes (or,\n"
        "where tokens are drawn, as probable), and each accepted draft saves a pass. The text goes to\n"
        "standard output.",
        epilog="examples:\n"
        "  lsjax generate --model demo --prompt 'The capital of France is' --max-new-tokens 32\n"
        "  lsjax generate --model demo --chat --prompt 'Explain tides.' --exit-layer 10 --compare\n"
        "  lsjax generate --model demo --prompt 'Once upon a time' --exit-layer 10 --stream --temperature 0.8\n"
        "  lsjax generate --model ./checkpoint --prompt-file story.txt --exit-layer 4 --json\n\n"
        "exit status: 0, or 1 where --compare found that the texts differ, or 2 for wrong usage.",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="SRC",
        help="a directory in Hugging Face layout, a model's name on the Hugging Face hub, or 'demo' "
        "(SmolLM2-135M-Instruct, 98 MB, fetched once)",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        type=prompt_text,
        metavar="TEXT",
        help="a text to continue, or '-' for standard input; repeat it for a batch",
    )
    parser.add_argument(
        "--prompt-file",
        dest="prompt",
        action="append",
        type=prompt_file,
        metavar="FILE",
        help="a file that holds one prompt; may be repeated and mixed with --prompt",
    )
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
        "--max-new-tokens",
        type=at_least(1),
        default=128,
        metavar="N",
        help="stop after N new tokens, or earlier where the model ends its text (default: %(default)s)",
    )
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        metavar="NAME",
        help="self_speculative: draft and check (the default with --exit-layer); early_exit: the first E layers "
        "alone, unchecked: fast, another text; autoregressive: every layer for every token",
    )
    add_text_options(parser)
    parser.add_argument(
        "--stream",
        action="store_true",
        help="print the text as it is written, one prompt after the other; on a terminal accepted drafts in green and "
        "the model's own tokens in magenta (plain where NO_COLOR is set)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="answer both autoregressively and self-speculatively; show whether the texts agree, and how fast each was",
    )
    parser.add_argument(
        "--repetitions",
        type=at_least(1),
        metavar="R",
        help="timed runs of each strategy for --compare, after one that compiles (default: 3)",
    )
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument(
        "--dtype", choices=DTYPES, metavar="NAME", help=f"the weights' type: {', '.join(DTYPES)} (default: the file's)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs ``lsjax generate`` and returns its exit status."""
    options = make_parser().parse_args(argv)
    _check(options)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that torch is absent
    # Only now JAX and what builds on it, so that help and wrong usage answer at once.
    from lsjax.cli import session

    opened = session.open_session(options)
    if options.compare:
        from lsjax.cli import comparison

        return comparison.run(opened)
    if options.stream:
        from lsjax.cli import streaming

        return streaming.run(opened)
    return session.run(opened)


def _check(options: argparse.Namespace) -> None:
    """What can be seen without the model; fills in defaults that depend on other options."""
    if not options.prompt:
        raise UsageError("expected a prompt: give --prompt TEXT or --prompt-file FILE")
    if options.compare:
        if options.exit_layer is None:
            raise UsageError("--compare needs --exit-layer E, the number of layers that draft")
        if options.strategy is not None:
            raise UsageError("--compare runs both strategies: leave --strategy out")
        # Drawn texts differ where their distributions are the same.
        given = [f"--{name.replace('_', '-')}" for name in drawing_options(options)] + ["--stop"] * bool(options.stop)
        if given:
            raise UsageError(f"--compare is for whole greedy texts: leave {', '.join(given)} out")
    for name in ("compare", "json"):
        if options.stream and getattr(options, name):
            raise UsageError(f"--stream prints the text as it is written: leave --{name} out")
    if options.repetitions is not None and not options.compare:
        raise UsageError("--repetitions is for --compare")
    options.repetitions = options.repetitions or 3
    check_strategy(options)


def check_strategy(options: argparse.Namespace) -> None:
    """That an exit layer is there where one is needed; fills in the strategy and the number of drafts."""
    if options.exit_layer is None:
        if options.strategy in ("self_speculative", "early_exit"):
            raise UsageError(f"--strategy {options.strategy} needs --exit-layer E, the number of layers that draft")
        if options.num_speculations is not None:
            raise UsageError("--num-speculations needs --exit-layer E, the number of layers that draft")
    if options.strategy is None:
        options.strategy = "autoregressive" if options.exit_layer is None else "self_speculative"
    if options.num_speculations is None:
        options.num_speculations = 4
