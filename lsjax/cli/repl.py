"""What ``lsjax chat`` does: reads a line, shows the answer, says what it cost."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time

from lsjax.checks import check_depth
from lsjax.cli.parser import UsageError, usage_errors
from lsjax.cli.session import Answer, note
from lsjax.cli.signals import handled
from lsjax.cli.streaming import Display
from lsjax.cli.text_options import check_stops, drawing
from lsjax.io import load
from lsjax.prepared import prepare
from lsjax.text.conversation import Conversation, ConversationFullError
from lsjax.text.generator import TextGenerator
from lsjax.text.tokenizer import load_tokenizer

_CAPACITY = 4096


def run(options: argparse.Namespace) -> int:
    """Talks until the user leaves or standard input ends."""
    conversation = _open(options)
    if sys.stdin.isatty():
        _tell("a line is a message; /reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C ends an answer")
    display = Display(sys.stdout, colored=options.strategy == "self_speculative")
    while (line := _read_line()) is not None:
        match line.split():
            case []:
                continue
            case ["/exit"]:
                break
            case ["/reset"]:
                conversation.reset()
                _tell("all forgotten" + (" but the system message" if options.system else ""))
            case [command] if command.startswith("/"):
                _tell(f"unknown command {command}: there are /reset and /exit")
            case _:
                _turn(conversation, line, options.strategy, display)
    return 0


def _open(options: argparse.Namespace) -> Conversation:
    note(f"loading {options.model}")
    with usage_errors(f"--model {options.model}", ValueError, OSError, ImportError):
        tokenizer = load_tokenizer(options.model)  # first, since it is quick to fail
        params = load(options.model, dtype=options.dtype)
    if options.exit_layer is not None:
        with usage_errors(f"--exit-layer {options.exit_layer}", ValueError):
            check_depth(options.model, options.exit_layer, params.config)
    check_stops(options, tokenizer)
    generator = TextGenerator(prepare(params, donate=True), tokenizer)
    try:
        return Conversation(
            generator,
            capacity=options.capacity or min(params.config.trained_length, _CAPACITY),
            system=options.system,
            stop=options.stop,
            max_new_tokens=options.max_new_tokens,
            exit_layer=options.exit_layer,
            num_speculations=options.num_speculations,
            strategy=options.strategy,
            **drawing(options),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _read_line() -> str | None:
    """A line of standard input; None at its end."""
    if not sys.stdin.isatty():
        with usage_errors("standard input", UnicodeDecodeError):
            return sys.stdin.readline() or None
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then edits lines)
    try:
        return input("> ")
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        return ""
    except UnicodeDecodeError as error:
        _tell(str(error))
        return ""


def _turn(conversation: Conversation, line: str, strategy: str, display: Display) -> None:
    start = time.perf_counter()
    try:
        answer = conversation.ask(line.strip())
    except ConversationFullError as error:
        _tell(f"{error}: /reset begins a new one, and a shorter message may still fit")
        return
    except ValueError as error:  # bytes that are no text, or what the chat template refuses
        _tell(str(error))
        return
    except KeyboardInterrupt:  # while the message was read, or compiled for
        _tell("interrupted: the message is forgotten")
        return
    with handled(lambda *_: answer.stop(), signal.SIGINT):  # Ctrl-C ends the answer after its current round
        for piece in answer:
            display.show(piece)
    print(flush=True)
    found = Answer.of_results(strategy, time.perf_counter() - start, [answer.result])
    _tell(
        f"{found.line(compiled=False)}; read {conversation.read} tokens and kept {conversation.kept}, "
        f"{conversation.length} of {conversation.capacity} are used"
    )
    if conversation.length >= conversation.capacity:
        _tell("the conversation is full: /reset begins a new one")


def _tell(text: str) -> None:
    print(f"({text})", file=sys.stderr, flush=True)
