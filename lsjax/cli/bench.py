"""``lsjax bench``: how fast a model decodes here, autoregressively and self-speculatively, on prompts of one's own."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lsjax.cli.generate import DTYPES
from lsjax.cli.parser import Parser, UsageError, at_least, prompt_text, prompts_file, usage_errors

DATASETS = ("humaneval",)


def make_parser() -> Parser:
    """The parser of ``lsjax bench``."""
    parser = Parser(
        prog="lsjax bench",
        description="Lets a model continue prompts greedily, autoregressively and, with --exit-layer E, self-\n"
        "speculatively, in turns after one run that compiles, and prints the speed of each beside what\n"
        "explains it: drafts accepted, time to the first token and of a round, memory bandwidth in use.",
        epilog="examples:\n"
        "  lsjax bench --model demo --exit-layer 10 --max-new-tokens 32\n"
        "  lsjax bench --model ./checkpoint --dataset humaneval --limit 16 --exit-layer 4 --dtype bfloat16\n"
        "  lsjax bench --model ./checkpoint --prompts questions.jsonl --chat --batch-size 8 --no-eos --json\n\n"
        "exit status: 0, or 1 where the texts of the two differ by more than ties of rounding, or 2 for wrong usage.",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="SRC",
        help="a directory, a .gguf file, a model's name on the Hugging Face hub, or 'demo'",
    )
    sources = parser.add_mutually_exclusive_group()
    sources.add_argument(
        "--prompts",
        type=prompts_file,
        metavar="FILE",
        help='one prompt a line; in a .jsonl file {"prompt": "..."} or {"tokens": [ids]} (default: a few built-in)',
    )
    sources.add_argument(
        "--prompt",
        action="append",
        type=prompt_text,
        metavar="TEXT",
        help="a text to continue, or '-' for standard input; may be repeated",
    )
    sources.add_argument(
        "--dataset",
        choices=DATASETS,
        metavar="NAME",
        help="humaneval: the 164 heads of functions of HumanEval (needs the extra 'bench')",
    )
    parser.add_argument("--limit", type=at_least(1), metavar="N", help="the first N prompts alone")
    parser.add_argument(
        "--batch-size", type=at_least(1), default=1, metavar="B", help="prompts at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--exit-layer",
        type=at_least(1),
        metavar="E",
        help="draft with the first E layers; without it autoregressive decoding alone is measured",
    )
    parser.add_argument(
        "--num-speculations", type=at_least(0), metavar="K", help="tokens drafted before each check (default: 4)"
    )
    parser.add_argument(
        "--early-exit", action="store_true", help="measure the first E layers alone, too: another text, unchecked"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=at_least(1),
        default=64,
        metavar="N",
        help="new tokens a prompt, or fewer where the model ends its text (default: %(default)s)",
    )
    parser.add_argument("--no-eos", action="store_true", help="never end a text early: N new tokens for every prompt")
    parser.add_argument(
        "--repetitions",
        type=at_least(1),
        default=3,
        metavar="R",
        help="timed runs of each strategy, after one that compiles (default: %(default)s)",
    )
    parser.add_argument("--chat", action="store_true", help="put each prompt into the model's chat template")
    parser.add_argument(
        "--dtype", choices=DTYPES, metavar="NAME", help=f"the weights' type: {', '.join(DTYPES)} (default: the file's)"
    )
    parser.add_argument(
        "--prepare",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put the weights into the form that decodes fastest, once, before all runs (default: yes)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs ``lsjax bench`` and returns its exit status."""
    options = make_parser().parse_args(argv)
    if options.exit_layer is None and (options.early_exit or options.num_speculations is not None):
        needing = "--early-exit" if options.early_exit else "--num-speculations"
        raise UsageError(f"{needing} needs --exit-layer E, the number of layers that draft")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would say that torch is absent
    # Only now JAX and what builds on it, so that help and wrong usage answer at once.
    from lsjax.checks import check_depth
    from lsjax.cli.session import encode_prompts, interruptible, long_capacity, note
    from lsjax.io import load
    from lsjax.measure.benchmark import benchmark
    from lsjax.prepared import prepare
    from lsjax.text.prompts import pad_rows

    prompts, source = _choose_prompts(options)
    note(f"loading {options.model}")
    with usage_errors(f"--model {options.model}", ValueError, OSError, ImportError):
        rows = encode_prompts(options.model, prompts, chat=options.chat)
        params = load(options.model, dtype=options.dtype)
    strategies = []
    if options.exit_layer is not None:
        with usage_errors(f"--exit-layer {options.exit_layer}", ValueError):
            check_depth(options.model, options.exit_layer, params.config)
        strategies = ["self_speculative", *["early_exit"] * options.early_exit]
    if options.prepare:
        params = prepare(params, donate=True)
    tokens, lengths = pad_rows(rows)
    with usage_errors(source, ValueError), _progress_bar() as progress, interruptible():
        found = benchmark(
            params,
            tokens,
            prompt_lengths=lengths,
            batch_size=options.batch_size,
            exit_layer=options.exit_layer,
            num_speculations=4 if options.num_speculations is None else options.num_speculations,
            max_new_tokens=options.max_new_tokens,
            strategies=strategies,
            eos_token_id=() if options.no_eos else None,
            capacity=long_capacity(params.config, tokens.shape[1] + options.max_new_tokens),
            repetitions=options.repetitions,
            progress=progress,
        )
    print(json.dumps({"model": options.model, "source": source} | found.to_dict()) if options.json else found)
    return 0 if found.ok else 1


def _choose_prompts(options: argparse.Namespace) -> tuple[list[Any], str]:
    """Texts and rows of ids, and where they come from."""
    from lsjax.text.datasets import load_dataset
    from lsjax.text.prompts import PROMPTS

    if options.dataset is not None:
        source = f"--dataset {options.dataset}"
        with usage_errors(source, ValueError, ImportError):
            prompts: list[Any] = list(load_dataset(options.dataset))
    elif options.prompts is not None:
        prompts, source = options.prompts, "--prompts"
    elif options.prompt is not None:
        prompts, source = options.prompt, "--prompt"
    else:
        prompts, source = list(PROMPTS), "built-in prompts"
    return prompts[: options.limit], source


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error, where that is a terminal; it is gone at the end."""
    from tqdm import tqdm

    with contextlib.ExitStack() as stack:
        bar: Any = None

        def progress(strategy: str, done: int, total: int) -> None:
            nonlocal bar
            if bar is None:  # not before whatever is wrong was said
                bar = stack.enter_context(tqdm(total=total, file=sys.stderr, disable=None, leave=False, unit="run"))
            bar.set_description_str(strategy, refresh=False)
            bar.n = done
            bar.refresh()

        yield progress
