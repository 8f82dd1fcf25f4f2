"""Pictures of a training's log. Importing this module needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lsjax.training.record import read_log

try:
    from matplotlib import colormaps
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError(f"drawing needs matplotlib ({error}): install lsjax with its extra 'plot'") from error

Entries = Sequence[dict[str, Any]]


def draw_all(directory: Path) -> None:
    """Draws what the log in a directory has, each picture whole or not at all."""
    entries = read_log(directory)
    for name, figure in (
        ("loss", draw_loss(entries)),
        ("agreement", draw_agreement(entries)),
        ("drafts", draw_drafts(entries)),
    ):
        if figure is not None:
            part = directory / f"{name}.png.part"
            figure.savefig(part, format="png")
            part.replace(directory / f"{name}.png")


def draw_loss(entries: Entries) -> Figure | None:
    """Losses over the steps: what is minimised, the last layer's, and of each exit on held-out text.

    Args:
        entries: of :func:`~lsjax.training.record.read_log`, like the rest.

    Returns:
        a figure; None where the log has nothing to draw, like the rest.
    """
    steps, looks = _of_kind(entries, "step"), _of_kind(entries, "held_out")
    if not steps:
        return None
    figure, axes = _axes("step", "cross-entropy per token")
    at = [entry["step"] for entry in steps]
    axes.plot(at, [entry["loss"] for entry in steps], color="0.75", linewidth=0.8, label="training, all exits weighted")
    axes.plot(at, [entry["last_loss"] for entry in steps], color="0.45", linewidth=0.8, label="training, last layer")
    if looks:
        at, losses = [entry["step"] for entry in looks], np.array([entry["losses"] for entry in looks], float)
        for layer, color in enumerate(_colors(losses.shape[1])):
            is_end = layer in (0, losses.shape[1] - 1)
            label = f"held out, after layer {layer + 1}" if is_end else None
            axes.plot(at, losses[:, layer], color=color, marker="o", markersize=2, linewidth=1.2, label=label)
    axes.legend(frameon=False)
    return figure


def draw_agreement(entries: Entries) -> Figure | None:
    """How often each layer names the last layer's token on held-out text, over depth; later looks are darker."""
    looks = _of_kind(entries, "held_out")
    if not looks:
        return None
    figure, axes = _axes("exit after layer", "agrees with the last layer (%)")
    for entry, color in zip(looks, _colors(len(looks)), strict=True):
        layers = np.arange(1, len(entry["agreement"]) + 1)
        is_end = entry in (looks[0], looks[-1])
        label = f"step {entry['step']}" if is_end else None
        axes.plot(layers, 100 * np.array(entry["agreement"]), color=color, marker="o", markersize=3, label=label)
    axes.set_ylim(-2, 102)
    axes.legend(frameon=False)
    return figure


def draw_drafts(entries: Entries) -> Figure | None:
    """What real self-speculative decoding accepted, and its tokens a round, over the steps."""
    drafts = _of_kind(entries, "drafts")
    if not drafts:
        return None
    figure = Figure(figsize=(8, 6), dpi=110, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    exits = sorted({entry["exit_layer"] for entry in drafts})
    for exit_layer, color in zip(exits, _colors(len(exits)), strict=True):
        of_exit = [entry for entry in drafts if entry["exit_layer"] == exit_layer]
        at = [entry["step"] for entry in of_exit]
        rates, rounds = ([entry[name] for entry in of_exit] for name in ("acceptance_rate", "tokens_per_round"))
        above.plot(at, 100 * np.array(rates), color=color, marker="o", markersize=3, label=f"exit {exit_layer}")
        below.plot(at, rounds, color=color, marker="o", markersize=3)
    above.set(ylabel="drafts accepted (%)", ylim=(-2, 102))
    below.set(xlabel="step", ylabel="tokens a round", ylim=(0.95, None))
    above.legend(frameon=False)
    for axes in (above, below):
        _tidy(axes)
    return figure


def _of_kind(entries: Entries, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in entries if entry.get("kind") == kind]


def _axes(x: str, y: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(8, 4.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y)
    _tidy(axes)
    return figure, axes


def _tidy(axes: Any) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _colors(count: int) -> list[Any]:
    """From light to dark."""
    return [colormaps["viridis_r"](0.15 + 0.85 * index / max(count - 1, 1)) for index in range(count)]
