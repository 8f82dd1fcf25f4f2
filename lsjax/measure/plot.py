"""The table of agreement as a picture. Importing this module needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

import numpy as np

from lsjax.measure.agreement import Agreement

try:
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(f"drawing needs matplotlib ({error}): install lsjax with its extra 'plot'") from error

_AGREES, _ACCEPTED, _SPEED = "#1f5a96", "#c2571a", "#2c7a3f"


def draw(found: Agreement, title: str) -> Figure:
    """Agreement, acceptance, tokens a round and the estimated speed-up over the layer of the exit.

    Args:
        found: of :func:`~lsjax.measure.agreement.agreement`.
        title: the model, for the first line above the picture; the second says what was measured.

    Returns:
        a figure: ``draw(found, "my model").savefig("layers.png")``.
    """
    layers, (low, high) = np.arange(1, len(found.matches) + 1), found.interval
    drafts, best = found.num_speculations, found.best_layer
    figure = Figure(figsize=(8, 6.6), dpi=150, layout="constrained")
    rates, speed = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))

    rates.fill_between(layers, 100 * low, 100 * high, color=_AGREES, alpha=0.2, linewidth=0)
    rates.plot(layers, 100 * found.rate, color=_AGREES, marker="o", markersize=4, label="agrees with the last layer")
    spread = 100 * found.rate_per_prompt
    if spread.shape[1] > 1:
        lines = rates.plot(layers, spread, color=_AGREES, alpha=0.3, linewidth=0.7)
        lines[0].set_label("the same, each prompt alone")
    accepted = 100 * found.acceptance_rate
    rates.plot(layers, accepted, color=_ACCEPTED, marker="s", markersize=4, label=f"drafts accepted, K = {drafts}")
    rates.set(ylabel="share of tokens (%)", ylim=(-2, 102))

    speed.axhline(1, color="0.5", linewidth=1, linestyle="--", label="autoregressive decoding")
    speed.plot(layers, found.tokens_per_round, color=_ACCEPTED, marker="s", markersize=4, label="tokens a round")
    speed.plot(
        layers,
        found.estimated_speed_up,
        color=_SPEED,
        marker="o",
        markersize=4,
        label="estimated speed-up (memory-bound)",
    )
    if best is not None:
        for axes in (rates, speed):
            axes.axvline(best, color=_SPEED, linewidth=1, alpha=0.6)
        speed.annotate(
            f"best: layer {best}, {found.estimated_speed_up[best - 1]:.2f} times",
            (best, found.estimated_speed_up[best - 1]),
            textcoords="offset points",
            xytext=(6, 8) if best <= len(layers) // 2 else (-6, 8),
            ha="left" if best <= len(layers) // 2 else "right",
            color=_SPEED,
        )
    speed.set(xlabel="exit after layer", ylabel="tokens; times autoregressive", ylim=(0, None))
    speed.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    for axes in (rates, speed):
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9)  # above, on no curve
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)

    texts, tokens = len(found.lengths), int(found.lengths.sum())
    source = "greedy tokens of the model's own" if found.generated else "tokens of the given text"
    prompts = f"{texts} prompt{'s'[: texts > 1]}"
    about = f"{tokens} {source}, {prompts}; rounds of K = {drafts} drafts; band: 95% interval"
    figure.suptitle(f"{title}\n{about}", fontsize=11)
    return figure
