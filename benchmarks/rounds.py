"""What a round consists of, and the speed-up that this predicts at any acceptance, with measured points on the line.

    python benchmarks/rounds.py [--model demo DIR ...] [--exit-layers 4,10,20] [--num-speculations 4] [--batch 1]

The parts (a draft step, the last draft, the verification of K + 1 positions, an autoregressive step) are timed alone,
in turns; the bound of a round is the sum of its matrix products, each at the rate measured for its width, and of the
cache at the measured bandwidth. Then texts are generated both ways, and the measured speed-up stands beside the
predicted one; with ``--transformers`` beside transformers' too, in the same turns (batch 1, models that are directories
in Hugging Face's layout).
"""

import gc
from pathlib import Path
from typing import Any

import common
import numpy as np
import rivals
from matplotlib.figure import Figure

import lsjax
from lsjax.measure import round_costs, time_in_turns


def main() -> None:
    """Measures every model and exit and writes ``rounds``."""
    parser = common.parser(__doc__, several_models=True)
    parser.add_argument("--exit-layers", default="4,10,20")
    parser.add_argument("--num-speculations", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--transformers", action="store_true")
    parser.add_argument("--name", default="rounds", help="of the results' files")
    options = parser.parse_args()
    found = []
    for model in options.model:
        params = lsjax.prepare(lsjax.load(model, dtype=options.dtype), donate=True)
        rival = rivals.Transformers(Path(model), options.dtype) if options.transformers else None
        exits = map(int, options.exit_layers.split(","))
        found.extend(_run(options, model, params, rival, exit_layer) for exit_layer in exits)
        del params, rival
        gc.collect()
    columns = ("model", "exit", "draft step", "last draft", "verify", "round", "round / bound", "AR step", "bound / AR")
    measured = ("accepted", "tokens/round", "predicted", "measured", "measured / predicted")
    table = common.to_table([*columns, *measured], [_row(entry) for entry in found])
    if options.transformers:
        names = list(found[0]["tokens_per_second"])
        speeds = [[Path(e["model"]).name, *(f"{e['tokens_per_second'][name]:.2f}" for name in names)] for e in found]
        table += "\n\n" + common.to_table(["tokens a second", *names], speeds)
    about = f"\n\nMilliseconds; K = {options.num_speculations}, batch {options.batch}, {options.dtype}."
    results = {"num_speculations": options.num_speculations, "batch": options.batch, "dtype": options.dtype}
    common.write(options.out, options.name, results | {"runs": found}, table + about, _draw(found, options))


def _run(options: Any, name: str, params: Any, rival: rivals.Transformers | None, exit_layer: int) -> dict[str, Any]:
    drafts, batch, new = options.num_speculations, options.batch, options.new_tokens
    tokens = common.prompts(name, params.config, batch, options.prompt_length)
    settings: dict[str, Any] = {"capacity": tokens.shape[1] + new, "eos_token_id": ()}
    plan = {"exit_layer": exit_layer, "num_speculations": drafts}
    calls: dict[str, Any] = {
        "autoregressive": lambda: lsjax.generate(params, tokens, max_new_tokens=new, **settings),
        "self_speculative": lambda: lsjax.generate(params, tokens, max_new_tokens=new, **settings, **plan),
        # What both share, so that rounds alone are compared: the prompt's pass, the start of a call, and one token.
        "prompt": lambda: lsjax.generate(params, tokens, max_new_tokens=1, **settings),
    }
    if rival is not None:
        calls |= {
            "transformers, autoregressive": lambda: rival.generate(tokens, new),
            "transformers, early exit": lambda: rival.generate(tokens, new, exit_layer),
        }
    progress = common.Progress(len(calls) * (options.repetitions + 1))
    timings = time_in_turns(calls, repetitions=options.repetitions, progress=progress)
    costs = round_costs(
        params,
        exit_layer,
        drafts,
        batch=batch,
        length=options.prompt_length + new // 2,
        repetitions=options.repetitions,
    )
    drafted: Any = timings["self_speculative"].result
    plain: Any = timings["autoregressive"].result
    rounds = int(np.max(drafted.stats.rounds))
    return {
        "model": name,
        "exit_layer": exit_layer,
        "costs": costs.to_dict(),
        "acceptance_rate": float(np.sum(drafted.stats.accepted) / np.sum(drafted.stats.drafted)),
        "tokens_per_round": new / rounds,
        "same_tokens": bool(np.array_equal(plain.tokens, drafted.tokens)),
        "predicted": costs.speed_up(new / rounds),
        "measured": _decoding(timings, "autoregressive") / _decoding(timings, "self_speculative"),
        "seconds": {name: timing.seconds.to_dict() for name, timing in timings.items()},
        "transformers": None if rival is None else rival.setting,
        "tokens_per_second": {
            name: batch * new / timing.median for name, timing in timings.items() if name != "prompt"
        },
        "predicted_line": {f"{rate:.2f}": costs.speed_up(float(costs.tokens_per_round(rate))) for rate in _RATES},
    }


_RATES = np.linspace(0, 1, 21)


def _decoding(timings: Any, name: str) -> float:
    """Seconds after the prompt."""
    return timings[name].median - timings["prompt"].median


def _row(entry: dict[str, Any]) -> list[Any]:
    costs = entry["costs"]

    def ms(value: Any) -> str:
        return f"{1000 * (value['median'] if isinstance(value, dict) else value):.2f}"

    steps = [ms(costs[key]) for key in ("draft_step", "last_draft", "verification", "round")]
    return [
        Path(entry["model"]).name,
        entry["exit_layer"],
        *steps,
        f"{costs['round']['median'] / costs['round_bound']:.2f}",
        ms(costs["autoregressive"]),
        f"{costs['step_bound'] / costs['autoregressive']['median']:.2f}",
        f"{entry['acceptance_rate']:.1%}",
        f"{entry['tokens_per_round']:.2f}",
        f"{entry['predicted']:.2f}",
        f"{entry['measured']:.2f}",
        f"{entry['measured'] / entry['predicted']:.2f}",
    ]


def _draw(found: list[dict[str, Any]], options: Any) -> Figure:
    figure = Figure(figsize=(7.5, 5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(1, color=common.BOUND, linewidth=1, linestyle="--", label="autoregressive decoding")
    for index, entry in enumerate(found):
        line = entry["predicted_line"]
        color, label = f"C{index}", f"{Path(entry['model']).name}, exit {entry['exit_layer']}"
        axes.plot([100 * float(rate) for rate in line], list(line.values()), color=color, label=f"{label}: predicted")
        axes.plot(100 * entry["acceptance_rate"], entry["measured"], "o", color=color, label=f"{label}: measured")
    axes.set(
        xlabel="accepted drafts of all drafts (%)",
        ylabel="speed-up over autoregressive decoding",
        title=f"Self-speculative decoding, K = {options.num_speculations}, batch {options.batch}, {options.dtype}",
        xlim=(0, 100),
        ylim=(0, None),
    )
    axes.legend(fontsize=7)
    return figure


if __name__ == "__main__":
    main()
