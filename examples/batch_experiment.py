"""A batch experiment: how many drafts are accepted, by exit layer, number of drafts and prompt, as heat maps.

Exit layer and number of drafts decide which program runs, so each pair is compiled once; all prompts go through it as
one batch, and the statistics of every row come back with the text.

Run it as ``python examples/batch_experiment.py [CHECKPOINT [PICTURE.png]]``: by default on SmolLM2-135M-Instruct, which
is fetched once (some minutes on a laptop). It needs the extra ``plot``.
"""

import itertools
import sys

import jax
import numpy as np
from matplotlib.figure import Figure

import lsjax
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


def run(params: lsjax.Params, tokens: np.ndarray, lengths: np.ndarray, exits: list[int]) -> np.ndarray:
    """Acceptance rates, float32 ``[exits, drafts, prompts]``."""
    rates = np.zeros((len(exits), len(DRAFTS), len(tokens)), np.float32)
    for (i, exit_layer), (j, drafts) in itertools.product(enumerate(exits), enumerate(DRAFTS)):
        out = lsjax.generate(
            params,
            tokens,
            prompt_lengths=lengths,
            exit_layer=exit_layer,
            num_speculations=drafts,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=(),
        )
        rates[i, j] = out.stats.acceptance_rate
    return rates


def draw(rates: np.ndarray, exits: list[int], title: str) -> Figure:
    """Two heat maps: the mean over prompts by exit and drafts, and each prompt by exit at the most drafts."""
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    axes = figure.subplots(1, 2)
    panels = [
        (rates.mean(axis=2), [str(k) for k in DRAFTS], "drafts a round", "mean over all prompts"),
        (rates[:, -1], list(PROMPTS), "prompt", f"each prompt, {DRAFTS[-1]} drafts a round"),
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


def main(source: str = "demo", picture: str = "batch_experiment.png") -> None:
    """Runs the experiment on a checkpoint and writes the picture."""
    params, tokenizer = lsjax.load(source), load_tokenizer(source)
    rows = [tokenizer(text)["input_ids"] for text in PROMPTS.values()]
    lengths = np.array([len(row) for row in rows])
    tokens = np.array([row + [0] * (lengths.max() - len(row)) for row in rows])
    layers = params.config.num_hidden_layers
    exits = sorted({max(1, round(layers * part)) for part in (0.2, 0.4, 0.6, 0.8, 0.9)})
    compilations = count_compilations()
    rates = run(params, tokens, lengths, exits)
    pairs = len(exits) * len(DRAFTS)
    print(f"{rates.size} runs: {pairs} pairs of exit layer and drafts, {len(rows)} prompts in one batch each")
    print(f"{len(compilations)} programs compiled, {sum(compilations):.0f} s of compiling")
    for exit_layer, of_exit in zip(exits, rates, strict=True):
        by_drafts = ", ".join(f"{k}: {rate.mean():.1%}" for k, rate in zip(DRAFTS, of_exit, strict=True))
        print(f"exit layer {exit_layer:2} of {layers}, accepted by drafts a round: {by_drafts}")
    title = f"Drafts accepted: {source}, greedy, {len(rows)} prompts, {NEW_TOKENS} new tokens each, {params.dtype}"
    draw(rates, exits, title).savefig(picture, dpi=110)
    print(f"picture: {picture}")


if __name__ == "__main__":
    main(*sys.argv[1:])
