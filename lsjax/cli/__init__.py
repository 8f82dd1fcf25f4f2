"""The ``lsjax`` command: each subcommand is one module, imported when it is called, that owns its parser."""

from __future__ import annotations

import functools
import importlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from lsjax.cli.launch import KeptPrograms, keep_compiled_programs
from lsjax.cli.parser import Parser, UsageError

COMMANDS = {
    "generate": "continue prompts with a Llama, plainly or self-speculatively, or compare the two",
    "chat": "talk with a model, which keeps what it has read between turns",
    "convert": "write a checkpoint anew, in Flax's or Hugging Face's layout",
    "inspect": "say what a checkpoint is and whether it would load, from its headers",
    "train": "train a model's exits by the LayerSkip recipe, from nothing or from a model",
    "agreement": "how often each layer names the whole model's token: look at it before choosing an exit",
    "bench": "measure how fast a model decodes here, with what explains the speed, on prompts of one's own",
    "parity": "compare a checkpoint's modules, logits and greedy text with transformers' in torch",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status.

    Args:
        argv: the arguments after the program's name; None: those of this process, which then also keeps its compiled
            programs (:mod:`lsjax.cli.launch`).

    Returns:
        0 for success, 1 where a comparison failed or an inspected checkpoint would not load, 2 for wrong usage (said in
        one line on stderr), 130 after Ctrl-C, 141 where the reader of standard output has gone.
    """
    kept = None
    if argv is None:
        kept = keep_compiled_programs()
        # A terminal that has not all characters of a text shows what it has not as an escape.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    program = "lsjax"
    try:
        if not arguments or arguments[0] not in COMMANDS:
            _parser().parse_args(arguments)  # help, version, or what is wrong
        program = f"lsjax {arguments[0]}"
        command = importlib.import_module(f"lsjax.cli.{arguments[0]}")
        with warnings.catch_warnings():
            warnings.showwarning = functools.partial(_show_warning, program, kept)
            return command.main(arguments[1:])
    except UsageError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough; what is left must not raise at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    finally:
        if kept is not None:
            kept.drop_oldest()


def _show_warning(program: str, kept: KeptPrograms | None, message: Warning | str, *_: Any, **__: Any) -> None:
    if kept is None or not kept.take_warning(program, str(message)):
        print(f"{program}: warning: {message}", file=sys.stderr)


def _parser() -> Parser:
    import importlib.metadata  # slow for what most calls do not ask

    width = max(map(len, COMMANDS))
    parser = Parser(
        prog="lsjax",
        description="LayerSkip self-speculative decoding for JAX: a Llama drafts with its first layers and verifies\n"
        "with the rest, so it writes what it would have written anyway, in fewer passes.",
        epilog="commands:\n"
        + "".join(f"  {name:{width}}  {summary}\n" for name, summary in COMMANDS.items())
        + "\n'lsjax COMMAND --help' explains a command.",
    )
    parser.add_argument("--version", action="version", version=f"lsjax {importlib.metadata.version('lsjax')}")
    parser.add_argument("command", choices=COMMANDS, help="what to do")
    return parser
