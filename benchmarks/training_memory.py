"""What a training step holds: 1B and 8B shapes, with and without chunked losses and rematerialisation.

    python benchmarks/training_memory.py [--shapes llama-3.2-1b,llama-3-8b] [--length 2048] [--rows 1] ...

Nothing is computed: the step is compiled for shapes alone, with a loss at every exit, and XLA says what its program
needs. State: parameters, AdamW's two moments, all float32, and the batch. Temporaries: gradients, what reverse mode
keeps, logits. Everything is computed in float32, since XLA's CPU backend, which is asked here, makes float32 copies of
what is bfloat16; with ``--dtype bfloat16`` on a GPU what reverse mode keeps is half as large.
"""

import dataclasses
import functools
import itertools
import time
from typing import Any

import common
import jax
import jax.numpy as jnp

import lsjax
from lsjax.measure.memory import program_bytes
from lsjax.measure.synthetic import SHAPES
from lsjax.training import Batch, EarlyExitLoss, LayerDropout, Recipe, compiler_options, init_state, train_step

GIB = 2**30


def main() -> None:
    """Compiles every program and writes ``training_memory``."""
    parser = common.parser(__doc__)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--layers", type=int, help="of each shape, instead of its own")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunk", type=int, default=256)
    options = parser.parse_args()
    runs = []
    for shape, (chunk, remat) in itertools.product(
        options.shapes.split(","), itertools.product((0, options.chunk), (False, True))
    ):
        config = SHAPES[shape]
        if options.layers:
            config = dataclasses.replace(config, num_hidden_layers=options.layers)
        recipe = Recipe(
            steps=1000,
            batch_size=options.rows,
            dtype=options.dtype,
            remat=remat,
            loss_chunk=chunk,
            layer_dropout=LayerDropout(rate=0.2),
            early_exit=EarlyExitLoss(scale=1.0, curriculum="all"),
        )
        begin = time.perf_counter()
        runs.append(
            {"shape": shape, "chunk": chunk, "remat": remat, **measure(config, recipe, options.length)}
            | {"compile_seconds": time.perf_counter() - begin}
        )
        print(runs[-1], flush=True)
    table = common.to_table(
        ["shape", "loss in chunks of", "layers anew", "state, GiB", "temporaries, GiB", "together, GiB"],
        [
            [
                run["shape"],
                run["chunk"] or "-",
                "yes" if run["remat"] else "-",
                *(f"{run[name] / GIB:.1f}" for name in ("state_bytes", "temporary_bytes", "bytes")),
            ]
            for run in runs
        ],
    )
    about = (
        f"{options.rows} row{'s'[: options.rows > 1]} of {options.length} tokens, {options.dtype}, a loss at every exit"
    )
    common.write(options.out, "training_memory", {"about": about, "runs": runs}, f"{table}\n\n{about}")


def measure(config: lsjax.LlamaConfig, recipe: Recipe, length: int) -> dict[str, Any]:
    """Bytes of one step's program."""
    state = jax.eval_shape(functools.partial(init_state, recipe), lsjax.Params.abstract(config))
    ids = jax.ShapeDtypeStruct((recipe.batch_size, length), jnp.int32)
    options = compiler_options(recipe)
    step = jax.jit(functools.partial(train_step, recipe), donate_argnums=0, compiler_options=options)
    compiled = step.lower(state, Batch(ids, ids, ids, ids)).compile()
    found: Any = compiled.memory_analysis()
    return {
        "state_bytes": found.argument_size_in_bytes,
        "temporary_bytes": found.temp_size_in_bytes,
        "bytes": program_bytes(compiled),
    }


if __name__ == "__main__":
    main()
