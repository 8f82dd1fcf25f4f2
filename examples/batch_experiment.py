"""A batch experiment: how many drafts are accepted, by exit layer, number of drafts and prompt, as heat maps.

Exit layer and number of drafts decide which program runs, so each pair is compiled once; all prompts go through it as
one batch, and the statistics of every row come back with the text. For greedy text,
``lsjax.measure.agreement`` knows all pairs from two programs; the experiment checks that it does.

Run it as ``python examples/batch_experiment.py [CHECKPOINT [PICTURE.png]]``: by default on SmolLM2-135M-Instruct, which
is fetched once (a quarter of an hour on two cores). It needs the extra ``plot``.
"""

import dataclasses
import itertools
import sys
from collections.abc import Sequence

import jax
import numpy as np
from matplotlib.figure import Figure

import lsjax
from lsjax.text.prompts import encode, pad_rows
from lsjax.text.tokenizer import load_tokenizer

PROMPTS = {
    "prose": "The old lighthouse keeper climbed the stairs one last time, and",
    "code": "def mean(numbers):\n    total = 0\n    for number in numbers:\n",
    "list": "The days of the week are Monday, Tuesday,",
    "counting": "1, 2, 3, 4, 5, 6, 7,",
    "repetition": "the cat sat on the mat, the cat sat on the mat, the cat",
    "question": "Question: What is the boiling point of water?\nAnswer:",
}
DRAFTS = (1, 2, 4, 6)
NEW_TOKENS = 48


def count_compilations() -> list[float]:
    """A list that grows by the seconds of each program that is compiled from now on."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds


def rates_of(stats: lsjax.Stats) -> np.ndarray:
    """``stats.acceptance_rate`` in NumPy, so that the count of programs below is that of the model's own."""
    return np.asarray(stats.accepted) / np.maximum(stats.drafted, 1)


def run(params: lsjax.Params, prompts: dict, exits: Sequence[int], drafts: Sequence[int]) -> np.ndarray:
    """Acceptance rates, float32 ``[exits, drafts, prompts]``."""
    rates = []
    for exit_layer, count in itertools.product(exits, drafts):
        out = lsjax.generate(params, **prompts, exit_layer=exit_layer, num_speculations=count)
        rates.append(rates_of(out.stats))
    return np.reshape(rates, (len(exits), len(drafts), -1))


def predict(params: lsjax.Params, prompts: dict, exits: Sequence[int], drafts: Sequence[int]) -> np.ndarray:
    """The same, for all pairs from one autoregressive run and one pass over every layer."""
    found = lsjax.measure.agreement(params, **prompts)
    rates = [rates_of(dataclasses.replace(found, num_speculations=count).stats) for count in drafts]
    return np.stack(rates, axis=1)[np.array(exits) - 1]


def draw(rates: np.ndarray, exits: Sequence[int], drafts: Sequence[int], title: str) -> Figure:
    """Two heat maps: the mean over prompts by exit and drafts, and each prompt by exit at the most drafts."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    axes = figure.subplots(1, 2)
    panels = [
        (rates.mean(axis=2), [str(k) for k in drafts], "drafts a round", "mean over all prompts"),
        (rates[:, -1], list(PROMPTS), "prompt", f"each prompt, {drafts[-1]} drafts a round"),
    ]
    for axis, (values, names, label, heading) in zip(axes, panels, strict=True):
        axis.imshow(100 * values, vmin=0, vmax=100, cmap="viridis", aspect="auto", origin="lower")
        axis.set_xticks(range(len(names)), names, rotation=30 if label == "prompt" else 0)
        axis.set_yticks(range(len(exits)), [str(depth) for depth in exits])
        axis.set(xlabel=label, ylabel="exit layer", title=heading)
        for (row, column), value in np.ndenumerate(values):
            color = "white" if value < 0.6 else "black"
            axis.text(column, row, f"{value:.0%}", ha="center", va="center", color=color)
    figure.colorbar(axes[0].images[0], ax=axes, label="drafts accepted (%)")
    figure.suptitle(title)
    return figure


def main(
    source: str = "demo",
    picture: str = "batch_experiment.png",
    exits: Sequence[int] | None = None,
    drafts: Sequence[int] = DRAFTS,
    new_tokens: int = NEW_TOKENS,
) -> None:
    """Runs the experiment on a checkpoint and writes the picture."""
    params, tokenizer = lsjax.load(source), load_tokenizer(source)
    tokens, lengths = pad_rows([encode(text, tokenizer) for text in PROMPTS.values()])
    prompts = {"tokens": tokens, "prompt_lengths": lengths, "max_new_tokens": new_tokens, "eos_token_id": ()}
    layers = params.config.num_hidden_layers
    exits = exits or sorted({max(1, round(layers * part)) for part in (0.2, 0.4, 0.6, 0.8, 0.9)})

    compilations = count_compilations()
    rates = run(params, prompts, exits, drafts)
    pairs = f"{len(exits) * len(drafts)} pairs of exit layer and drafts"
    print(f"{pairs}, {len(tokens)} prompts each: {rates.size} acceptance rates from {len(compilations)} programs")
    before = len(compilations)
    difference = np.abs(predict(params, prompts, exits, drafts) - rates).max()
    print(f"predicted from {len(compilations) - before} programs: the largest difference is {difference:.6f}")

    for exit_layer, of_exit in zip(exits, rates, strict=True):
        by_drafts = ", ".join(f"{k}: {rate.mean():.1%}" for k, rate in zip(drafts, of_exit, strict=True))
        print(f"exit layer {exit_layer:2} of {layers}, accepted by drafts a round: {by_drafts}")
    title = f"Drafts accepted: {source}, greedy, {len(tokens)} prompts, {new_tokens} new tokens each, {params.dtype}"
    draw(rates, exits, drafts, title).savefig(picture, dpi=110)
    print(f"picture: {picture}")


if __name__ == "__main__":
    given = dict(zip(("source", "picture"), sys.argv[1:], strict=False))
    main(**given)
