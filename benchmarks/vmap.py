"""``vmap`` over keys against a batch of the same size: the same rows, so it should cost the same.

    python benchmarks/vmap.py [--rows 32] [--new-tokens 32] [--repetitions 7] [--model demo]

Each key draws a prompt and the model continues it; both forms are compiled first and then timed in turns.
"""

import argparse
import functools
import json
import statistics
import time

import jax
import numpy as np

import lsjax


def main() -> None:
    """Times both forms in turns and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--prompt-length", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repetitions", type=int, default=7)
    options = parser.parse_args()

    params = lsjax.load(options.model)
    keys = jax.random.split(jax.random.key(0), options.rows)
    results = {}
    for name, plan in {"autoregressive": {}, "self_speculative": {"exit_layer": 10, "num_speculations": 4}}.items():
        generate = functools.partial(lsjax.generate, max_new_tokens=options.new_tokens, eos_token_id=(), **plan)

        def draw(key):
            return jax.random.randint(key, (options.prompt_length,), 0, params.config.vocab_size)

        def mapped(params, keys, generate=generate, draw=draw):
            return jax.vmap(lambda key: generate(params, draw(key)).tokens)(keys)

        def batched(params, keys, generate=generate, draw=draw):
            return generate(params, jax.vmap(draw)(keys)).tokens

        forms = {"vmap": jax.jit(mapped), "batch": jax.jit(batched)}
        tokens = {form: np.asarray(function(params, keys)) for form, function in forms.items()}
        seconds = {form: [] for form in forms}
        for _ in range(options.repetitions):
            for form, function in forms.items():
                start = time.perf_counter()
                jax.block_until_ready(function(params, keys))
                seconds[form].append(time.perf_counter() - start)
        medians = {form: statistics.median(times) for form, times in seconds.items()}
        results[name] = {
            "same_tokens": bool((tokens["vmap"] == tokens["batch"]).all()),
            "median_seconds": {form: round(value, 3) for form, value in medians.items()},
            "ratio": round(medians["vmap"] / medians["batch"], 3),
            "ratios": [round(v / b, 3) for v, b in zip(seconds["vmap"], seconds["batch"], strict=True)],
        }
    print(
        json.dumps({"model": options.model, "rows": options.rows, "new_tokens": options.new_tokens} | results, indent=2)
    )


if __name__ == "__main__":
    main()
