"""``lsjax convert``: a checkpoint written anew in another format."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lsjax.cli.generate import DTYPES
from lsjax.cli.parser import Parser, byte_count, human_bytes, usage_errors

TARGETS = ("flax", "hf")


def make_parser() -> Parser:
    """The parser of ``lsjax convert``."""
    parser = Parser(
        prog="lsjax convert",
        description="Writes a checkpoint anew, with its configuration and tokenizer. Tensors go from file to file one\n"
        "by one, bit for bit unless --dtype is given, and DST appears whole or not at all.",
        epilog="examples:\n"
        "  lsjax convert facebook/layerskip-llama3.2-1B ./layerskip --dtype bfloat16\n"
        "  lsjax convert model.gguf ./model --to hf\n"
        "  lsjax convert ./old-checkpoint-in-bin ./checkpoint --to hf --shard-size 2GB\n\n"
        "exit status: 0, or 2 where SRC cannot be read, DST cannot be written, or for wrong usage.",
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a directory in Hugging Face layout (safetensors or .bin) or written by lsjax, a .gguf file, a model's "
        "name on the Hugging Face hub, or 'demo'",
    )
    parser.add_argument(
        "destination", metavar="DST", help="a directory: absent, empty, or written by lsjax (and then replaced)"
    )
    parser.add_argument(
        "--to",
        choices=TARGETS,
        default="flax",
        metavar="FORMAT",
        help="flax: Flax names and layouts, as lsjax.save writes; hf: Hugging Face's layout in safetensors, for "
        "transformers (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="NAME",
        help=f"the weights' type: {', '.join(DTYPES)} (default: as stored; float32 from GGUF)",
    )
    parser.add_argument(
        "--shard-size",
        type=byte_count,
        default=5 * 10**9,
        metavar="SIZE",
        help="more weights than this become several files and an index, for instance 500MB (default: 5GB)",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Runs ``lsjax convert`` and returns its exit status."""
    options = make_parser().parse_args(argv)
    from lsjax.io import convert

    start = time.perf_counter()
    with usage_errors(options.source, ValueError, OSError, ImportError):
        found = convert(
            options.source,
            options.destination,
            to=options.to,
            dtype=options.dtype,
            shard_bytes=options.shard_size,
        )
    seconds = time.perf_counter() - start
    weights = [name for name in found.files if name.endswith(".safetensors")]
    print(
        f"{found.directory}: {found.num_tensors} tensors, {human_bytes(found.num_bytes)}, in {len(weights)} "
        f"file{'s'[: len(weights) != 1]} ({options.to}); {'with' if found.has_tokenizer else 'without'} a tokenizer; "
        f"{seconds:.1f} s" + (f"; left out, nothing of the model: {len(found.left_out)}" if found.left_out else "")
    )
    return 0
