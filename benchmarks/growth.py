"""How a token's time grows: with context length, capacity, batch, drafts a round, and exit layer.

    python benchmarks/growth.py [--model demo] [--lengths 128,512,2048,8000] [--capacities 512,2048,8192] ...

Every point is one part of decoding in a compiled loop of its own (``lsjax.measure.steps``), over a cache that exists
already: allocating one of ``--capacities`` is timed apart. All points of one curve are timed in turns.
"""

from collections.abc import Callable
from typing import Any

import common
import jax
from matplotlib.figure import Figure

import lsjax
from lsjax.measure import time_in_turns
from lsjax.measure.steps import Loop, autoregressive_step, speculative_round


def main() -> None:
    """Measures every curve and writes ``growth``."""
    parser = common.parser(__doc__)
    parser.add_argument("--lengths", default="128,512,2048,8000")
    parser.add_argument("--capacities", default="512,2048,8192")
    parser.add_argument("--batches", default="1,2,4,8,16")
    parser.add_argument("--drafts", default="1,2,4,6,8")
    parser.add_argument("--exit-layers", default="4,10,20")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    params = lsjax.prepare(lsjax.load(options.model, dtype=options.dtype), donate=True)
    used, exits = 256, _ints(options.exit_layers)

    def step(**where: Any) -> Loop:
        return autoregressive_step(params, **where)

    def rounds(depth: int, drafts: int, **where: Any) -> Loop:
        return speculative_round(params, depth, drafts, length=used, **where)

    curves: dict[str, dict[int, Callable[[], Any]]] = {
        "context length": {length: step(length=length) for length in _ints(options.lengths)},
        "capacity": {held: step(length=used, capacity=held) for held in _ints(options.capacities)},
        "batch": {rows: step(length=used, batch=rows) for rows in _ints(options.batches)},
        "drafts a round": {drafts: rounds(exits[0], drafts) for drafts in _ints(options.drafts)},
        "exit layer": {depth: rounds(depth, 4) for depth in exits},
    }
    timings = {}
    for name, calls in curves.items():
        progress = common.Progress(len(calls) * (options.repetitions + 1))
        timings[name] = time_in_turns(calls, repetitions=options.repetitions, progress=progress)
        calls.clear()  # their caches
    found = {
        name: {size: timing.seconds.map(Loop.seconds_of).to_dict() for size, timing in curve.items()}
        for name, curve in timings.items()
    }
    capacities = _ints(options.capacities)
    least, most = min(capacities), max(capacities)
    ratio = timings["capacity"].ratio(most, least)
    allocation = time_in_turns(
        {held: lambda held=held: params.init_cache(1, held, params.config.num_hidden_layers) for held in (least, most)},
        repetitions=options.repetitions,
    )
    table = common.to_table(
        ["", "size", "ms", "unit"],
        [
            [
                name,
                size,
                f"{1000 * spread['median']:.2f}",
                "a round" if name in ("drafts a round", "exit layer") else "a step",
            ]
            for name, curve in found.items()
            for size, spread in curve.items()
        ],
    )
    table += (
        f"\n\nCapacity {most} against {least} at {used} used positions: {ratio.median:.3f} times a step; allocating a "
        f"cache takes {1000 * allocation[most].median:.1f} and {1000 * allocation[least].median:.1f} ms, once."
    )
    results = {
        "model": options.model,
        "dtype": options.dtype,
        "used": used,
        "seconds": found,
        "capacity_ratio": ratio.to_dict(),
        "allocation_seconds": {held: timing.seconds.to_dict() for held, timing in allocation.items()},
    }
    common.write(options.out, "growth", results, table, _draw(found, options))


def _ints(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _draw(found: dict[str, Any], options: Any) -> Figure:
    figure = Figure(figsize=(13, 3.2), layout="constrained")
    for axes, (name, curve) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        sizes, medians = list(curve), [1000 * spread["median"] for spread in curve.values()]
        low, high = ([1000 * spread["quartiles"][end] for spread in curve.values()] for end in (0, 1))
        axes.plot(sizes, medians, "o-", color=common.OURS)
        axes.fill_between(sizes, low, high, color=common.OURS, alpha=0.2)
        rounds = name in ("drafts a round", "exit layer")
        axes.set(xlabel=name, ylabel="ms a round" if rounds else "ms a step", ylim=(0, None))
        if name in ("context length", "capacity", "batch"):
            axes.set_xscale("log", base=2)
    figure.suptitle(f"{options.model}, {options.dtype}, {jax.default_backend()}: medians and quartiles")
    return figure


if __name__ == "__main__":
    main()
