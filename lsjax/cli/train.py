"""``lsjax train``: trains a model by the LayerSkip recipe, or goes on with it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lsjax.cli.parser import Parser, usage_errors
from lsjax.cli.signals import handled


def make_parser() -> Parser:
    """The parser of ``lsjax train``."""
    parser = Parser(
        prog="lsjax train",
        description="Trains a Llama whose early layers draft well: layer dropout and early-exit loss (LayerSkip,\n"
        "arXiv 2404.16710), from random weights or from a model. Interrupted, it goes on where it was.",
        epilog="A file:\n"
        '  out = "runs/small"\n'
        '  tokenizer = "tokenizer"            # or init = "owner/name", to finetune a model\n'
        "  [model]                            # entries of config.json; none with init\n"
        "  hidden_size = 256\n"
        "  ...\n"
        "  [data]\n"
        '  files = ["corpus/**/*.txt"]        # texts, or .jsonl of text, prompt and completion, messages, tokens\n'
        "  sequence_length = 256\n"
        "  [recipe]\n"
        "  steps = 2000\n"
        "  batch_size = 16\n"
        "  [recipe.optimizer]\n"
        "  learning_rate = 1e-3\n"
        "  [recipe.layer_dropout]\n"
        "  rate = 0.1\n"
        "  [recipe.early_exit]\n"
        "  scale = 0.2\n"
        '  curriculum = "rotational"\n'
        "  [watch]\n"
        "  every = 200\n"
        "  exits = [4]\n\n"
        "All entries are described in lsjax.training: Settings, Data, Recipe, Optimizer, LayerDropout, EarlyExitLoss,\n"
        "Watch. In the directory 'out' lie log.jsonl, pictures, checkpoints and, at the end, model/, which\n"
        "'lsjax generate --model' and 'lsjax convert' take.\n\n"
        "exit status: 0, or 1 where the loss is no number any more, or 2 for wrong usage, or 130 after Ctrl-C (twice:\n"
        "at once).",
    )
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="the training, in TOML")
    parser.add_argument("--out", metavar="DIR", help="its directory, instead of the file's")
    parser.add_argument("--init", metavar="SRC", help="the model to start from, instead of the file's")
    parser.add_argument(
        "--resume",
        action=argparse.BooleanOptionalAction,
        help="go on from the last checkpoint (the default where there is one), or begin anew and remove what is there",
    )
    parser.add_argument("--quiet", action="store_true", help="print nothing on the way")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs ``lsjax train`` and returns its exit status."""
    options = make_parser().parse_args(argv)
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that torch is absent
    # Only now JAX and what builds on it, so that help and wrong usage answer at once.
    from lsjax.training.loop import TrainingDiverged, TrainingStopped
    from lsjax.training.run import run
    from lsjax.training.settings import read_settings

    with usage_errors(f"--config {options.config}", ValueError):
        changes = {"out": options.out, "init": options.init}
        settings = read_settings(options.config, **changes)
    tell = (lambda text: None) if options.quiet else _print
    try:
        with stopping() as should_stop, usage_errors("training", ValueError, OSError, ImportError):
            result = run(
                settings,
                resume=options.resume,
                tell=tell,
                progress=False if options.quiet else None,
                should_stop=should_stop,
            )
    except TrainingDiverged as error:
        print(f"lsjax train: {error}", file=sys.stderr)
        return 1
    except TrainingStopped as error:
        tell(f"{settings.out}: {error}: call the same command again")
        return 130
    tell(f"{result}: the trained model")
    return 0


def _print(text: str) -> None:
    from tqdm import tqdm

    tqdm.write(text)  # above the bar
    sys.stdout.flush()


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C or a request to terminate has come; a second Ctrl-C ends the process at once."""
    asked = threading.Event()

    def ask(number: int, frame: Any) -> None:
        asked.set()
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with handled(ask, signal.SIGINT, signal.SIGTERM):
        yield asked.is_set
