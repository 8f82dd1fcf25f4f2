"""Synthetic checkpoints of published shapes whose early exit is accepted at a chosen rate, for timing without them.

    python benchmarks/agreeing.py --shape llama-3.2-1b --exit-layer 4 --acceptance 0.75 --out DIR

Weights follow from a seed, and the acceptance from one number, the scale of the layers after the exit: it is looked up
in agreeing.json, or else found there (minutes) and added. The model is then checked with other prompts, in greedy
self-speculative generation of at least 2,000 tokens: the acceptance has to lie within 0.03 of the wanted one, and no
stretch of the text may repeat with a period below 16. ``--no-check`` leaves that out, and the checkpoint is there in
the time that the weights take. Its directory is in Hugging Face's layout and says that it is synthetic.

Other benchmarks call ``build``; for models that are no shape of this file, ``lsjax.measure.calibrate``.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax

import lsjax
from lsjax.measure.synthetic import SHAPES

SCALES = Path(__file__).with_name("agreeing.json")
TOLERANCE = 0.03
LEAST_CYCLE = 16  # a text that repeats sooner is no text to time anything with
PROMPT_LENGTH, BATCH, NEW_TOKENS = 16, 16, 136  # 2,176 new tokens


def describe(shape: str, exit_layer: int, acceptance: float, num_speculations: int, seed: int, dtype: str) -> dict:
    """What decides about a checkpoint, but for the scale; the key of an entry of agreeing.json."""
    return {
        "shape": shape,
        "exit_layer": exit_layer,
        "acceptance": acceptance,
        "num_speculations": num_speculations,
        "seed": seed,
        "dtype": dtype,
    }


def entries() -> list[dict[str, Any]]:
    """All that were found so far."""
    return json.loads(SCALES.read_text()) if SCALES.exists() else []


def find(wanted: dict[str, Any]) -> dict[str, Any] | None:
    """The entry of what is wanted, or None."""
    return next((entry for entry in entries() if wanted.items() <= entry.items()), None)


def record(entry: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Puts an entry into agreeing.json, in place of an older one."""
    kept = [other for other in entries() if not wanted.items() <= other.items()]
    ordered = sorted([*kept, entry], key=lambda e: (e["shape"], e["dtype"], e["exit_layer"], e["acceptance"]))
    new = SCALES.with_suffix(".new")
    new.write_text(json.dumps(ordered, indent=2) + "\n")
    os.replace(new, SCALES)


def keys(seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of the weights, of the prompts that the scale is found with, and of those that it is checked with."""
    weights = jax.random.key(seed)
    # Each array has the key's child of its number; these numbers are no array's.
    return weights, jax.random.fold_in(weights, 2**32 - 1), jax.random.fold_in(weights, 2**32 - 2)


def calibrate(wanted: dict[str, Any], base: lsjax.Params, batch: int = BATCH) -> dict[str, Any]:
    """The entry of what is wanted: its scale, found with the model ``base`` whose scale is 1."""
    found = lsjax.measure.calibrate(
        base,
        exit_layer=wanted["exit_layer"],
        acceptance=wanted["acceptance"],
        key=keys(wanted["seed"])[1],
        num_speculations=wanted["num_speculations"],
        batch=batch,
        prompt_length=PROMPT_LENGTH,
        max_new_tokens=NEW_TOKENS,
        tolerance=TOLERANCE,
    )
    return {**wanted, "scale": found.scale, "found": found.found.to_dict()}


def check(wanted: dict[str, Any], params: lsjax.Params, batch: int = BATCH) -> dict[str, Any]:
    """What generation from other prompts than those of the calibration shows."""
    shape = (batch, PROMPT_LENGTH)
    prompts = jax.random.randint(keys(wanted["seed"])[2], shape, 0, params.config.vocab_size)
    return lsjax.measure.measure_acceptance(
        params,
        prompts,
        exit_layer=wanted["exit_layer"],
        num_speculations=wanted["num_speculations"],
        max_new_tokens=NEW_TOKENS,
    ).to_dict()


def problems(wanted: dict[str, Any], checked: dict[str, Any]) -> list[str]:
    """What is wrong with a checked model, in words."""
    found = []
    if abs(checked["acceptance_rate"] - wanted["acceptance"]) > TOLERANCE:
        found.append(f"acceptance {checked['acceptance_rate']}, expected {wanted['acceptance']} within {TOLERANCE}")
    if (checked["shortest_cycle"] or LEAST_CYCLE) < LEAST_CYCLE:
        found.append(f"the text repeats with a period of {checked['shortest_cycle']}, expected {LEAST_CYCLE} or more")
    return found


def build(
    shape: str = "llama-3.2-1b",
    *,
    exit_layer: int = 4,
    acceptance: float = 0.75,
    num_speculations: int = 4,
    seed: int = 0,
    dtype: str = "float32",
    batch: int = BATCH,
) -> tuple[lsjax.Params, dict[str, Any]]:
    """A synthetic model on JAX's default device and its entry, which is found first where agreeing.json lacks it."""
    wanted = describe(shape, exit_layer, acceptance, num_speculations, seed, dtype)
    options: Any = {"exit_layer": exit_layer, "key": keys(seed)[0], "dtype": dtype}
    entry = find(wanted)
    if entry is None:
        base = lsjax.measure.agreeing_params(SHAPES[shape], scale=1, **options)
        entry = calibrate(wanted, base, batch)
        record(entry, wanted)
        return lsjax.measure.scale_deep_layers(base, exit_layer, entry["scale"]), entry
    return lsjax.measure.agreeing_params(SHAPES[shape], scale=entry["scale"], **options), entry


def main() -> None:
    """Makes one checkpoint, checks it, and prints a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.2-1b")
    parser.add_argument("--exit-layer", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.75, help="accepted drafts / drafts")
    parser.add_argument("--num-speculations", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--batch",
        type=int,
        default=BATCH,
        help=f"prompts, {NEW_TOKENS} new tokens each; more tell the rate more exactly",
    )
    parser.add_argument("--out", type=Path, help="the checkpoint's directory")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    wanted = describe(given.shape, given.exit_layer, given.acceptance, given.num_speculations, given.seed, given.dtype)

    start = time.perf_counter()
    params, entry = build(
        wanted["shape"], **{name: value for name, value in wanted.items() if name != "shape"}, batch=given.batch
    )
    wrong = []
    if given.check:
        entry = {**entry, "checked": check(wanted, params, given.batch)}
        record(entry, wanted)
        wrong = problems(wanted, entry["checked"])
    if given.out and not wrong:
        name = f"synthetic-{given.shape}-exit-{given.exit_layer}-accepts-{given.acceptance}"
        made = {"name": name, "made_by": "lsjax/benchmarks/agreeing.py", **entry}
        lsjax.measure.save_synthetic(params, given.out, made)
    print(json.dumps({**entry, "seconds": round(time.perf_counter() - start, 1)}, indent=2))
    if wrong:
        sys.exit("not written: " + "; ".join(wrong))


if __name__ == "__main__":
    main()
