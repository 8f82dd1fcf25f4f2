"""Time to the first token in a new process, with a cold and a warm compilation cache, and how often XLA compiles.

    python benchmarks/compile.py [--model demo] [--exit-layer 10]

Each run is a process of its own; the cache's directory is a temporary one, kept from the cold run to the warm ones.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import common

_CHILD = """
import json, sys, time
start = time.perf_counter()
import jax
compilations, hits = [], []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: compilations.append(seconds) if name.endswith("backend_compile_duration") else None)
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if name.endswith("cache_hits") else None)
import lsjax
model, exit_layer = sys.argv[1:]
imported = time.perf_counter()
params = lsjax.prepare(lsjax.load(model), donate=True)
jax.block_until_ready(params)
loaded = time.perf_counter()
plan = {} if exit_layer == "none" else {"exit_layer": int(exit_layer)}
made = len(compilations)
lsjax.generate(params, list(range(1, 17)), max_new_tokens=1, eos_token_id=(), **plan).tokens.block_until_ready()
first = time.perf_counter()
print(json.dumps({"import": imported - start, "load": loaded - imported, "first_token": first - loaded,
                  "programs": len(compilations) - made, "programs_of_load": made, "cache_hits": len(hits)}))
"""


def main() -> None:
    """Runs the processes and writes ``compile``."""
    parser = common.parser(__doc__)
    parser.add_argument("--exit-layer", type=int, default=10)
    options = parser.parse_args()
    found = {}
    for name, plan in (("autoregressive", "none"), ("self_speculative", str(options.exit_layer))):
        with tempfile.TemporaryDirectory() as cache:
            runs = [_child(options.model, plan, cache) for _ in range(options.repetitions + 1)]
        found[name] = {"cold": runs[0], "warm": _medians(runs[1:])}
    header = ["", "import s", "load s", "first token s", "programs", "of which from the cache"]
    rows = [
        [
            f"{name}, {state} cache",
            *(f"{run[key]:.2f}" for key in ("import", "load", "first_token")),
            f"{run['programs'] + run['programs_of_load']:.0f}",
            f"{run['cache_hits']:.0f}",
        ]
        for name, states in found.items()
        for state, run in states.items()
    ]
    common.write(options.out, "compile", {"model": options.model, "runs": found}, common.to_table(header, rows))


def _child(model: str, plan: str, cache: str) -> dict[str, Any]:
    kept = {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    command = [sys.executable, "-c", _CHILD, model, plan]
    done = subprocess.run(command, env=os.environ | kept, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


if __name__ == "__main__":
    main()
