"""What lsjax does on one GPU, in less than eight minutes, for the shapes of Llama 3.2 1B and Llama 3 8B.

    python benchmarks/gpu.py [--seconds 450] [--toy]

Correctness, decode, rounds and growth, in bfloat16. It needs what an image for JAX on CUDA has (jax, flax, safetensors,
NumPy); weights are made on the device, synthetic ones whose drafts are accepted about 75% of the time. Every shape is a
process of its own, and so is the run without XLA's command buffers; what is measured is written at once, and what no
longer fits into the time is named. ``--toy`` runs all of it with tiny models, on whatever device there is: a rehearsal,
whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SHAPES = {"llama-3.2-1b": (4, 0.14), "llama-3-8b": (8, 0.14)}  # exit layer, and where the search for a scale begins
TOY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DRAFTS, PROMPT, ACCEPTANCE = 4, 64, 0.75
NO_BUFFERS = "--xla_gpu_enable_command_buffer="  # an empty list of what is captured


def main() -> None:
    """Runs the processes one after the other and writes ``gpu``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=450, help="for everything")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--lengths", default="128,2048,8000")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--scale", type=float, help="of the deep layers, instead of one that is searched for")
    parser.add_argument("--part", nargs=2, metavar=("SHAPE", "STAGES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.deadline = time.monotonic() + options.seconds
    if options.part:
        for line in run_part(options, options.part[0], options.part[1].split(",")):
            print(json.dumps(line), flush=True)
        return
    parts = [
        (shape, stages, flags)
        for shape in options.shapes.split(",")
        for stages, flags in (("correctness,decode,rounds,growth", ""), ("decode", NO_BUFFERS))
    ]
    found: list[dict[str, Any]] = []
    for index, (shape, stages, flags) in enumerate(parts):
        # What is left is shared out evenly, so that no part starves those after it.
        left = (options.deadline - time.monotonic()) / (len(parts) - index)
        scales = [line["scale"] for line in found if line["stage"] == "calibration" and line["shape"] == shape]
        lines = _run(shape, stages, flags, left, *scales[:1])
        found.extend({"shape": shape, "xla_flags": flags} | line for line in lines)
        _write(options, found)


def _run(shape: str, stages: str, flags: str, seconds: float, scale: float | None = None) -> Iterator[dict[str, Any]]:
    """A part in a process of its own; the lines that it wrote, and what became of it."""
    command = [sys.executable, __file__, *sys.argv[1:], "--seconds", str(seconds), "--part", shape, stages]
    command += [] if scale is None else ["--scale", str(scale)]
    known = os.environ.get("XLA_FLAGS", "")
    environment = os.environ | {"XLA_FLAGS": f"{known} {flags}".strip()}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds + 30)
        out, error = done.stdout, done.stderr[-2000:] if done.returncode else ""
    except subprocess.TimeoutExpired as late:
        out, error = late.stdout or "", "killed: out of time"
        out = out.decode() if isinstance(out, bytes) else out
    for line in out.splitlines():
        if line.startswith("{"):
            yield json.loads(line)
    if error:
        yield {"stage": "error", "error": error}


def run_part(options: Any, shape: str, stages: list[str]) -> Iterator[dict[str, Any]]:
    """One shape's stages, each a few results; those that come too late are only named."""
    import jax

    import lsjax
    from lsjax.measure import agreeing_params, read_bandwidth, scale_deep_layers, synthetic

    exit_layer, scale = SHAPES[shape]
    config = synthetic.SHAPES[shape]
    if options.toy:
        layers = min(config.num_hidden_layers, exit_layer + 1)
        config = lsjax.LlamaConfig(num_hidden_layers=layers, **TOY)
    yield {"stage": "device", "bandwidth": read_bandwidth(), "kind": jax.devices()[0].device_kind}
    if "correctness" in stages:
        yield {"stage": "correctness", **correctness()}
    key = jax.random.key(0)
    base = agreeing_params(config, exit_layer=exit_layer, scale=1, key=key, dtype="bfloat16")
    model = lsjax.prepare(base, donate=True)
    del base
    gc.collect()
    if "decode" in stages:
        if options.scale is None:
            model, found = _calibrated(model, exit_layer, scale, options)
        else:
            model, found = scale_deep_layers(model, exit_layer, options.scale), {"scale": options.scale}
        yield {"stage": "calibration", **found}
    measures: dict[str, Callable[..., Iterator[dict[str, Any]]]] = {
        "decode": _decode,
        "rounds": _rounds,
        "growth": _growth,
    }
    for stage in [stage for stage in stages if stage in measures]:
        for found in measures[stage](model, exit_layer, options):
            yield {"stage": stage, **found}
        if time.monotonic() > options.deadline:
            yield {"stage": "error", "error": f"out of time in {stage}"}
            return


def correctness() -> dict[str, Any]:
    """A small float32 model on the device and on the CPU: logits, greedy texts, and both strategies' texts."""
    import jax
    import numpy as np

    import lsjax
    from lsjax.measure import agreeing_params

    config = lsjax.LlamaConfig(num_hidden_layers=6, **TOY)
    params = agreeing_params(config, exit_layer=3, scale=0.3, key=jax.random.key(1))
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (4, 24)).astype(np.int32)
    plans: tuple[dict[str, Any], ...] = ({}, {"exit_layer": 3})
    found: dict[str, Any] = {}
    with jax.default_matmul_precision("highest"):
        for name, device in (("device", jax.devices()[0]), ("cpu", jax.devices("cpu")[0])):
            placed = jax.device_put(params, device)
            with jax.default_device(device):
                logits = np.asarray(lsjax.forward(placed, tokens))
                texts = [
                    np.asarray(lsjax.generate(model, tokens, max_new_tokens=64, eos_token_id=(), **plan).tokens)
                    for model in (placed, lsjax.prepare(placed))
                    for plan in plans
                ]
            found[name] = (logits, texts)
    (here, texts), (there, expected) = found["device"], found["cpu"]
    return {
        "largest_logit_error": float(np.abs(here - there).max() / there.std()),
        "rows_equal_to_cpu": [int((a == b).all(axis=1).sum()) for a, b in zip(texts, expected, strict=True)],
        "rows_equal_both_ways": int((texts[0] == texts[1]).all(axis=1).sum()),
        "rows": len(tokens),
    }


def _calibrated(model: Any, exit_layer: int, scale: float, options: Any) -> tuple[Any, dict[str, Any]]:
    """The model whose drafts are accepted at about the wanted rate; if none is found, with the given scale."""
    import jax

    from lsjax.measure import calibrate, scale_deep_layers

    start = time.monotonic()
    try:
        found = calibrate(
            model,
            exit_layer=exit_layer,
            acceptance=ACCEPTANCE,
            key=jax.random.key(1),
            num_speculations=DRAFTS,
            prompt_length=PROMPT,
            max_new_tokens=options.new_tokens,
            tolerance=0.05,
        )
        scale, said = found.scale, {"found": found.found.to_dict()}
    except ValueError as error:
        said = {"failed": str(error)}
    return scale_deep_layers(model, exit_layer, scale), said | {"scale": scale, "seconds": time.monotonic() - start}


def _decode(model: Any, exit_layer: int, options: Any) -> Iterator[dict[str, Any]]:
    """Both strategies at every batch: tokens a second after the prompt, and utilisation."""
    import jax
    import numpy as np

    import lsjax
    from lsjax.measure import read_bandwidth, step_bytes, time_in_turns

    bandwidth, new = read_bandwidth(), options.new_tokens
    where: dict[str, Any] = {"capacity": PROMPT + new, "eos_token_id": ()}
    plan: dict[str, Any] = {"exit_layer": exit_layer, "num_speculations": DRAFTS}
    for batch in map(int, options.batches.split(",")):
        tokens = jax.random.randint(jax.random.key(batch), (batch, PROMPT), 0, model.config.vocab_size)
        calls = {
            "prompt": lambda tokens=tokens: lsjax.generate(model, tokens, max_new_tokens=1, **where),
            "autoregressive": lambda tokens=tokens: lsjax.generate(model, tokens, max_new_tokens=new, **where),
            "self_speculative": lambda tokens=tokens: lsjax.generate(
                model, tokens, max_new_tokens=new, **where, **plan
            ),
        }
        timings = time_in_turns(calls, repetitions=options.repetitions)
        plain, drafted = (timings[name].result for name in ("autoregressive", "self_speculative"))
        step = (timings["autoregressive"].median - timings["prompt"].median) / max(new - 1, 1)
        speeds = {name: batch * new / timings[name].median for name in calls if name != "prompt"}
        yield {
            "batch": batch,
            "new_tokens": new,
            "tokens_per_second": speeds,
            "speed_ratio": timings.ratio("autoregressive", "self_speculative").to_dict(),
            "time_to_first_token": timings["prompt"].median,
            "step_seconds": step,
            "bandwidth_utilization": step_bytes(model, positions=[PROMPT + new // 2] * batch) / step / bandwidth,
            "acceptance_rate": float(np.sum(drafted.stats.accepted) / np.sum(drafted.stats.drafted)),
            "tokens_per_round": float(np.sum(drafted.stats.new_tokens) / np.sum(drafted.stats.rounds)),
            "rows_equal": int((np.asarray(plain.tokens) == np.asarray(drafted.tokens)).all(axis=1).sum()),
            "compile_seconds": {name: timing.compile_seconds for name, timing in timings.items()},
        }
        if time.monotonic() > options.deadline:
            return


def _rounds(model: Any, exit_layer: int, options: Any) -> Iterator[dict[str, Any]]:
    from lsjax.measure import round_costs

    for batch in map(int, options.batches.split(",")):
        costs = round_costs(model, exit_layer, DRAFTS, batch=batch, length=PROMPT, repetitions=options.repetitions)
        lines = {f"{rate:.2f}": costs.speed_up(float(costs.tokens_per_round(rate))) for rate in (0.25, 0.5, 0.75, 1)}
        yield {"batch": batch, **costs.to_dict(), "predicted_speed_up": lines}
        if time.monotonic() > options.deadline:
            return


def _growth(model: Any, exit_layer: int, options: Any) -> Iterator[dict[str, Any]]:
    from lsjax.measure import time_in_turns
    from lsjax.measure.steps import COUNT, Loop, autoregressive_step

    lengths = [int(part) for part in options.lengths.split(",")]
    most = max(lengths) + 2 * COUNT
    calls: dict[Any, Any] = {("length", length): autoregressive_step(model, length=length) for length in lengths}
    calls["capacity", most] = autoregressive_step(model, length=min(lengths), capacity=most)
    timings = time_in_turns(calls, repetitions=options.repetitions)
    for (kind, size), timing in timings.items():
        yield {"of": kind, "size": size, "seconds": timing.seconds.map(Loop.seconds_of).to_dict()}
    yield {"of": "capacity ratio", "ratio": timings.ratio(("capacity", most), ("length", min(lengths))).to_dict()}


def _write(options: Any, found: list[dict[str, Any]]) -> None:
    import common

    rows = [
        [
            line["shape"],
            "off" if line["xla_flags"] else "on",
            line["batch"],
            *(f"{line['tokens_per_second'][name]:.0f}" for name in ("autoregressive", "self_speculative")),
            f"{line['speed_ratio']['median']:.2f}",
            f"{line['acceptance_rate']:.0%}",
            f"{line['bandwidth_utilization']:.2f}",
        ]
        for line in found
        if line["stage"] == "decode"
    ]
    header = [
        "shape",
        "command buffers",
        "batch",
        "autoregressive",
        "self-speculative",
        "ratio",
        "accepted",
        "of bandwidth",
    ]
    table = common.to_table(header, rows) + "\n\nTokens a second, bfloat16, synthetic weights."
    common.write(options.out, "gpu", {"toy": options.toy, "results": found}, table)


if __name__ == "__main__":
    main()
