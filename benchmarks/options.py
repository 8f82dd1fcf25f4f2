"""What decoding options cost, and what drafting less gains: each beside the same run without it.

    python benchmarks/options.py [--model demo] [--exit-layer 4] [--num-speculations 4] [--new-tokens 64]

Batch 1, float32 unless ``--dtype`` says otherwise; all variants in turns. First self-speculative decoding with shorter
drafts or fewer ids to draft from: the text stays the same, so only speed is compared (drawn texts are others, and their
rounds are compared). Then plain autoregressive decoding with sampling, processors, stop sequences and scores, against
greedy decoding without them.
"""

from pathlib import Path
from typing import Any

import common
import jax
import numpy as np

import lsjax
from lsjax import processors
from lsjax.measure import time_in_turns


def main() -> None:
    """Measures every variant and writes ``options``."""
    parser = common.parser(__doc__)
    parser.add_argument("--exit-layer", type=int, default=4)
    parser.add_argument("--num-speculations", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompt-length", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--draft-vocab", type=int, default=8192)
    parser.add_argument("--name", default="options", help="of the results' files")
    options = parser.parse_args()
    params = lsjax.prepare(lsjax.load(options.model, dtype=options.dtype), donate=True)
    tokens = common.prompts(options.model, params.config, 1, options.prompt_length)
    new = options.new_tokens
    settings: dict[str, Any] = {"max_new_tokens": new, "capacity": tokens.shape[1] + new, "eos_token_id": ()}
    plan = {"exit_layer": options.exit_layer, "num_speculations": options.num_speculations}
    # The most frequent ids of the model's own text, since a model of random weights has no other text like its own.
    text = lsjax.generate(params, tokens, **settings).tokens
    vocab = min(options.draft_vocab, params.config.vocab_size)
    fewer = lsjax.prepare(params, draft_vocab=vocab, draft_text=text)
    key = jax.random.key(0)
    drafting: dict[str, Any] = {
        "self-speculative": {},
        "confidence 0.2": {"confidence_threshold": 0.2},
        "confidence 0.4": {"confidence_threshold": 0.4},
        "confidence 0.8": {"confidence_threshold": 0.8},
        "heuristic schedule": {"num_speculations_schedule": "heuristic"},
        f"{vocab} ids to draft from": {},
        "drawn": {"key": key, "temperature": 0.8},
        "drawn, top-p": {"key": key, "temperature": 0.8, "top_p": 0.9},
        "drawn, greedy drafts": {"key": key, "temperature": 0.8, "greedy_drafts": True},
    }
    plain: dict[str, Any] = {
        "autoregressive": {},
        "temperature": {"key": key, "temperature": 0.8},
        "temperature, top-k": {"key": key, "temperature": 0.8, "top_k": 50},
        "temperature, top-p": {"key": key, "temperature": 0.8, "top_p": 0.9},
        "temperature, min-p": {"key": key, "temperature": 0.8, "min_p": 0.05},
        "repetition penalty": {"processors": processors.RepetitionPenalty(1.1)},
        "no repeated 3-grams": {"processors": processors.NoRepeatNgram(3)},
        "stop sequences": {"stop_sequences": [[params.config.vocab_size - 1] * 2]},
        "log-probabilities": {"log_probs": True},
        "and the top 5": {"log_probs": True, "top_n": 5},
    }

    def call(name: str, more: dict[str, Any], **plan: Any) -> Any:
        model = fewer if name.endswith("draft from") else params
        return lambda: lsjax.generate(model, tokens, **settings, **more, **plan)

    calls = {name: call(name, more, **plan) for name, more in drafting.items()}
    calls |= {name: call(name, more) for name, more in plain.items()}
    progress = common.Progress(len(calls) * (options.repetitions + 1))
    timings = time_in_turns(calls, repetitions=options.repetitions, progress=progress)
    entries = []
    for name, timing in timings.items():
        against = "self-speculative" if name in drafting else "autoregressive"
        stats = timing.result.stats
        entries.append(
            {
                "name": name,
                "against": against,
                "tokens_per_second": timing.seconds.map(lambda seconds: new / seconds).to_dict(),
                "speed": timings.ratio(against, name).to_dict(),
                "same_tokens": bool(np.array_equal(timing.result.tokens, timings[against].result.tokens)),
                "acceptance_rate": float(stats.acceptance_rate[0]),
                "tokens_per_round": float(stats.tokens_per_round[0]),
                "drafted": int(stats.drafted[0]),
                "milliseconds_per_round": 1e3 * timing.median / int(stats.rounds[0]),
            }
        )
    header = ["variant", "tokens/s", "times the speed of", "", "accepted", "drafted", "tokens/round", "ms/round"]
    rows = [
        [
            entry["name"],
            f"{entry['tokens_per_second']['median']:.2f}",
            entry["against"],
            f"{entry['speed']['median']:.2f}",
            f"{entry['acceptance_rate']:.1%}",
            entry["drafted"],
            f"{entry['tokens_per_round']:.2f}",
            f"{entry['milliseconds_per_round']:.1f}",
        ]
        for entry in entries
    ]
    about = f"{Path(options.model).name}, {options.dtype}, batch 1, {new} new tokens, exit {options.exit_layer}, "
    table = common.to_table(header, rows) + f"\n\n{about}K = {options.num_speculations}."
    common.write(options.out, options.name, {"entries": entries}, table)


if __name__ == "__main__":
    main()
