"""What sharing saves: one cache and the exit's hidden states, against a second cache and verification by all layers.

    python benchmarks/sharing.py [--model demo] [--exit-layers 4,10,20] [--num-speculations 4]

The other way is how two separate models would do it, and how speculation by early exit is done elsewhere: the drafts
keep keys and values of their own, and the whole model reads all K + 1 tokens from the embedding on. It needs no last
draft, since the whole model fills its own cache. Both are one compiled loop of the same length, timed in turns.
"""

from typing import Any

import common
import jax
import jax.numpy as jnp
from jax import lax
from matplotlib.figure import Figure

import lsjax
from lsjax.decode.sampling import greedy
from lsjax.decode.state import Plan
from lsjax.measure import time_in_turns
from lsjax.measure.steps import Carry, Loop, speculative_round


def main() -> None:
    """Measures both ways at every exit and writes ``sharing``."""
    parser = common.parser(__doc__)
    parser.add_argument("--exit-layers", default="4,10,20")
    parser.add_argument("--num-speculations", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    params = lsjax.prepare(lsjax.load(options.model, dtype=options.dtype), donate=True)
    drafts, where = options.num_speculations, {"batch": options.batch, "length": options.length}
    exits = [int(part) for part in options.exit_layers.split(",")]
    calls: dict[Any, Loop] = {}
    for depth in exits:
        calls["shared", depth] = speculative_round(params, depth, drafts, **where)
        calls["separate", depth] = separate_round(params, depth, drafts, options.batch, options.length)
    progress = common.Progress(len(calls) * (options.repetitions + 1))
    timings = time_in_turns(calls, repetitions=options.repetitions, progress=progress)
    found = {
        depth: {way: timings[way, depth].seconds.map(Loop.seconds_of).to_dict() for way in ("shared", "separate")}
        | {"ratio": timings.ratio(("separate", depth), ("shared", depth)).to_dict()}
        for depth in exits
    }
    rows = [
        [
            depth,
            *(f"{1000 * run[way]['median']:.2f}" for way in ("shared", "separate")),
            f"{run['ratio']['median']:.2f}",
            f"{(params.config.num_hidden_layers + depth) / params.config.num_hidden_layers:.2f}",
        ]
        for depth, run in found.items()
    ]
    header = ["exit layer", "shared, ms a round", "separate, ms a round", "separate / shared", "caches held"]
    results = {"model": options.model, "num_speculations": drafts, "dtype": options.dtype, "runs": found} | where
    common.write(options.out, "sharing", results, common.to_table(header, rows), _draw(found, options))


def separate_round(params: Any, exit_layer: int, drafts: int, batch: int, length: int) -> Loop:
    """K draft steps on a cache of their own, then all layers over K + 1 tokens, then the same commit of lengths."""
    layers = params.config.num_hidden_layers

    def body(params: Any, carry: Carry) -> Carry:
        state = carry.state
        start, zero = state.lengths - 1, jnp.int32(0)
        capacity = state.capacity

        def one(index: Any, drafted: Any) -> Any:
            token, tokens, cache = drafted
            embedded = params.embed(token[:, None])
            hidden, cache = params.run_layers(embedded, cache, start + index, hi=exit_layer, capacity=capacity)
            token = greedy(params.logits(hidden[:, 0]))
            return token, lax.dynamic_update_slice(tokens, token[:, None], (zero, index + 1)), cache

        first = jnp.zeros((state.tokens.shape[0], drafts + 1), jnp.int32).at[:, 0].set(state.last_token)
        _, tokens, early = lax.fori_loop(zero, drafts, one, (state.last_token, first, state.cache[:exit_layer]))
        hidden, cache = params.run_layers(
            params.embed(tokens), state.cache[exit_layer:], start, hi=layers, capacity=capacity
        )
        targets = greedy(params.logits(hidden))
        kept = jnp.cumprod(targets[:, :-1] == tokens[:, 1:], axis=1).sum(axis=1)
        write = jax.vmap(lambda row, block, at: lax.dynamic_update_slice(row, block, (at,)))
        state = state.replace(
            tokens=write(state.tokens, targets, state.lengths), lengths=state.lengths + kept + 1, cache=early + cache
        )
        return Carry(state, hidden)

    return Loop(body, params, Plan(exit_layer, layers, drafts), batch, length, None, num_caches=exit_layer + layers)


def _draw(found: dict[int, Any], options: Any) -> Figure:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for offset, (way, color) in enumerate((("shared", common.OURS), ("separate", common.THEIRS))):
        at = [index + 0.4 * offset - 0.2 for index in range(len(found))]
        bars = axes.bar(at, [1000 * run[way]["median"] for run in found.values()], 0.38, color=color, label=way)
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    axes.set_xticks(range(len(found)), list(map(str, found)))
    axes.set(xlabel="exit layer", ylabel="ms a round")
    axes.set_title(
        f"Cache and exit states: {options.model}, K = {options.num_speculations}, {options.dtype}", fontsize=10
    )
    axes.legend()
    return figure


if __name__ == "__main__":
    main()
