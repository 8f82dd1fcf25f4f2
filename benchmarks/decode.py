"""Tokens a second against transformers on the same weights: autoregressive, early exit, batches, prompts.

    python benchmarks/decode.py [--dtypes float32,bfloat16] [--batches 1,4,16] [--exit-layer 4] [--prefill 128,512,2048]

Both sides write the same number of greedy tokens after the same prompts, EOS off, and are timed in turns; transformers
with the attention and number of threads that it is fastest with here. Where llama-cpp-python is installed (best built
with ``CMAKE_ARGS=-DGGML_NATIVE=ON``), llama.cpp is compared at batch 1, in the same way and on the same numbers.
"""

import gc
import tempfile
from pathlib import Path
from typing import Any

import common
import jax
import numpy as np
import rivals
from matplotlib.figure import Figure

import lsjax
from lsjax.measure import read_bandwidth, step_bytes, time_in_turns
from lsjax.measure.steps import Loop, autoregressive_step


def main() -> None:
    """Runs all comparisons of one dtype after the other and writes ``decode``."""
    parser = common.parser(__doc__)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--exit-layer", type=int, default=4)
    parser.add_argument("--num-speculations", type=int, default=4)
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--prefill", default="128,512,2048")
    parser.add_argument("--name", default="decode", help="of the results' files")
    options = parser.parse_args()
    runs = [_run(options, dtype) for dtype in options.dtypes.split(",")]
    header = [""]
    for run in runs:
        columns = ["lsjax", *(column for name in run["rivals"] for column in (name, "ratio"))]
        header += [f"{run['dtype']}: {column}" for column in columns]
    table = common.to_table(header, _rows(runs))
    notes = "".join(
        f"\n\n{run['dtype']}: "
        + "".join(f"{name} with {setting}; " for name, setting in run["rivals"].items())
        + "lsjax's autoregressive step "
        f"{1000 * run['step_seconds']:.1f} ms, {run['bandwidth_utilization']:.2f} of the bound at "
        f"{run['bandwidth'] / 1e9:.1f} GB/s; {run['temporaries'] / 1e6:.1f} MB of temporaries, weights "
        f"{run['weight_bytes'] / 1e6:.0f} MB."
        for run in runs
    )
    common.write(options.out, options.name, {"model": options.model, "runs": runs}, table + notes, _draw(runs, options))


def _run(options: Any, dtype: str) -> dict[str, Any]:
    new = options.new_tokens
    with tempfile.TemporaryDirectory() as folder:
        params = lsjax.load(options.model, dtype=dtype)
        theirs = rivals.Transformers(rivals.save_for_rivals(params, Path(folder) / "model"), dtype)
        other = None
        lengths = list(map(int, filter(None, options.prefill.split(","))))
        if rivals.LlamaCpp.is_installed() and params.config.rope_scaling is None:
            slots = max([options.prompt_length + new, *lengths])
            other = rivals.LlamaCpp(rivals.save_gguf(params, Path(folder) / "model.gguf"), dtype, slots)
    model = lsjax.prepare(params, donate=True)
    del params
    calls: dict[Any, Any] = {}
    for batch in map(int, options.batches.split(",")):
        tokens = common.prompts(options.model, model.config, batch, options.prompt_length)
        calls["autoregressive", batch, "lsjax"] = _ours(model, tokens, new)
        calls["autoregressive", batch, "transformers"] = _theirs(theirs, tokens, new)
        if other is not None and batch == 1:
            calls["autoregressive", 1, other.name] = _theirs(other, tokens, new)
        drafts = {"exit_layer": options.exit_layer, "num_speculations": options.num_speculations}
        calls["early exit", batch, "lsjax"] = _ours(model, tokens, new, **drafts)
        if batch == 1:  # more rows transformers refuses
            calls["early exit", 1, "transformers"] = _theirs(theirs, tokens, new, options.exit_layer)
    for length in lengths:
        tokens = common.prompts(options.model, model.config, 1, length)
        calls["prefill", length, "lsjax"] = _ours(model, tokens, 1)
        calls["prefill", length, "transformers"] = _theirs(theirs, tokens, 1)
        if other is not None:
            calls["prefill", length, other.name] = _theirs(other, tokens, 1)
    step = autoregressive_step(model, length=options.prompt_length)
    calls["step", 1, "lsjax"] = step
    progress = common.Progress(len(calls) * (options.repetitions + 1))
    timings = time_in_turns(calls, repetitions=options.repetitions, progress=progress)
    bandwidth = read_bandwidth(repetitions=options.repetitions)
    seconds = timings["step", 1, "lsjax"].seconds.map(Loop.seconds_of).median
    entries = []
    for (kind, size, system), timing in timings.items():
        if kind == "step":
            continue
        tokens_written = size if kind == "prefill" else size * new
        entry = {
            "kind": kind,
            "size": size,
            "system": system,
            "tokens_per_second": timing.seconds.map(lambda s, n=tokens_written: n / s).to_dict(),
        }
        if system != "lsjax":
            ratio = timings.ratio((kind, size, system), (kind, size, "lsjax"))
            same = np.array_equal(timing.result, timings[kind, size, "lsjax"].result)
            entry |= {"ratio": ratio.to_dict(), "same_tokens": same}
        entries.append(entry)
    tokens = np.zeros((1, options.prompt_length), np.int32)
    compiled = jax.jit(lambda model, tokens: lsjax.generate(model, tokens, max_new_tokens=new, eos_token_id=()).tokens)
    memory: Any = compiled.lower(model, tokens).compile().memory_analysis()
    found = {
        "dtype": dtype,
        "rivals": {rival.name: rival.setting for rival in (theirs, other) if rival is not None},
        "new_tokens": new,
        "prompt_length": options.prompt_length,
        "exit_layer": options.exit_layer,
        "num_speculations": options.num_speculations,
        "bandwidth": bandwidth,
        "step_seconds": seconds,
        "bandwidth_utilization": step_bytes(model, positions=options.prompt_length) / seconds / bandwidth,
        "temporaries": memory.temp_size_in_bytes,
        "weight_bytes": model.num_bytes,
        "entries": entries,
    }
    del theirs, other, model, calls, timings, step
    gc.collect()
    return found


def _ours(model: Any, tokens: np.ndarray, new: int, **plan: Any) -> Any:
    # EOS off on both sides; the capacity is chosen to fit, as in any eager call.
    return lambda: np.asarray(lsjax.generate(model, tokens, max_new_tokens=new, eos_token_id=(), **plan).tokens)


def _theirs(rival: Any, tokens: np.ndarray, new: int, *plan: Any) -> Any:
    return lambda: rival.generate(tokens, new, *plan)


def _rows(runs: list[dict[str, Any]]) -> list[list[Any]]:
    """One row a kind and size; for each run a column, and two for each rival."""
    rows = []
    for kind, size in dict.fromkeys((entry["kind"], entry["size"]) for run in runs for entry in run["entries"]):
        row = [f"{kind}, {size} tokens" if kind == "prefill" else f"{kind}, batch {size}"]
        for run in runs:
            found = {e["system"]: e for e in run["entries"] if (e["kind"], e["size"]) == (kind, size)}
            row.append(f"{found['lsjax']['tokens_per_second']['median']:.1f}")
            for name in run["rivals"]:
                theirs = found.get(name)
                row.append("-" if theirs is None else f"{theirs['tokens_per_second']['median']:.1f}")
                row.append("-" if theirs is None else f"{theirs['ratio']['median']:.2f}")
        rows.append(row)
    return rows


def _draw(runs: list[dict[str, Any]], options: Any) -> Figure:
    figure = Figure(figsize=(9, 3.8 * len(runs)), layout="constrained")
    for axes, run in zip(figure.subplots(len(runs), 1, squeeze=False)[:, 0], runs, strict=True):
        labels = list(dict.fromkeys((e["kind"], e["size"]) for e in run["entries"]))
        systems = ["lsjax", *run["rivals"]]
        width, colors = 0.8 / len(systems), (common.OURS, common.THEIRS, common.BOUND)
        for offset, (system, color) in enumerate(zip(systems, colors, strict=False)):
            chosen = [e for e in run["entries"] if e["system"] == system]
            at = [labels.index((e["kind"], e["size"])) + width * (offset - (len(systems) - 1) / 2) for e in chosen]
            values = [e["tokens_per_second"]["median"] for e in chosen]
            bars = axes.bar(at, values, 0.95 * width, color=color, label=system)
            axes.bar_label(bars, [f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in values], fontsize=7)
        names = [f"{kind}\n{size} tokens" if kind == "prefill" else f"{kind}\nbatch {size}" for kind, size in labels]
        axes.set_xticks(range(len(labels)), names, fontsize=7)
        axes.set(
            yscale="log", ylabel="tokens a second", title=f"{options.model}, {run['dtype']}, {run['new_tokens']} new"
        )
        axes.legend()
    return figure


if __name__ == "__main__":
    main()
