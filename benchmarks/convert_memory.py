"""Memory and speed of conversion: a synthetic checkpoint of 8 shards and 1.6 GB, each way in a fresh process.

    python benchmarks/convert_memory.py [--directory DIR]

Peak memory is the process's largest resident set (``ru_maxrss``), the imports included; a process starts with the
peak of the one that started it, so that one does nothing itself.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

import lsjax.io
from lsjax.config import LlamaConfig
from lsjax.convert.names import HUGGINGFACE, source_shape
from lsjax.convert.writer import Output, split, write_json, write_weights
from lsjax.params import abstract_tree, flatten

CONFIG = LlamaConfig(
    vocab_size=32_000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=15,
    num_attention_heads=16,
    num_key_value_heads=4,
)
DTYPE = np.dtype(ml_dtypes.bfloat16)
SHARD_BYTES = 220_000_000


def write_checkpoint(directory: Path) -> None:
    """Random bfloat16 weights in Hugging Face layout, the same on every run."""
    outputs = []
    for number, (path, leaf) in enumerate(flatten(abstract_tree(CONFIG)).items()):
        name, transform = HUGGINGFACE.from_flax(path)
        shape = source_shape(transform, leaf.shape)

        def draw(number: int = number, shape: tuple[int, ...] = shape) -> np.ndarray:
            return np.random.default_rng(number).random(shape, np.float32).astype(DTYPE)

        outputs.append(Output(name, shape, DTYPE, draw))
    total = sum(output.num_bytes for output in outputs)
    shards = split(outputs, "model.safetensors", SHARD_BYTES)
    write_json(directory / "config.json", {**CONFIG.to_dict(), "dtype": "bfloat16"})
    write_weights(directory, shards, "model.safetensors", {"format": "pt"})
    largest = max(output.num_bytes for output in outputs)
    print(f"source: {total / 1e9:.2f} GB in {len(shards)} shards, largest tensor {largest / 1e6:.0f} MB")


def convert(source: str, destination: str, to: str, dtype: str | None) -> None:
    """What the fresh process does: one conversion, and its figures as JSON."""
    start = time.perf_counter()
    found = lsjax.io.convert(source, destination, to=to, dtype=dtype, progress=False)  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(json.dumps({"peak": peak, "seconds": seconds, "bytes": found.num_bytes, "files": len(found.files)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", help="where to write (some 8 GB for a while); default: the temporary directory")
    parser.add_argument("--convert", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        write_checkpoint(options.make)
        return
    if options.convert:
        source, destination, to, dtype = options.convert
        convert(source, destination, to, dtype or None)
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        source, flax = Path(name) / "source", Path(name) / "flax"
        source.mkdir()
        subprocess.run([sys.executable, __file__, "--make", str(source)], check=True)
        for label, given, to, dtype in (
            ("hf to flax", source, "flax", ""),
            ("hf to hf", source, "hf", ""),
            ("hf to flax, float32", source, "flax", "float32"),
            ("flax to hf", flax, "hf", ""),
        ):
            destination = flax if label == "hf to flax" else Path(name) / "other"
            command = [sys.executable, __file__, "--convert", str(given), str(destination), to, dtype]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                raise SystemExit(run.stderr)
            found = json.loads(run.stdout)
            print(
                f"{label:20} peak {found['peak'] / 1e6:5.0f} MB  {found['seconds']:6.1f} s  "
                f"{found['bytes'] / 1e6 / found['seconds']:5.0f} MB/s written, {found['files']} files"
            )


if __name__ == "__main__":
    main()
