"""What a comparison of speeds means, in words."""

from __future__ import annotations

from collections.abc import Sequence


def speed_verdict(
    ratio: float,
    *,
    drafted: int,
    acceptance_rate: float,
    tokens_per_round: float,
    exit_layer: int,
    num_layers: int,
    num_speculations: int,
) -> str:
    """How fast self-speculative decoding was, and, where it was slower, why.

    Args:
        ratio: its speed over that of autoregressive decoding.
        drafted: how many drafts there were.
        acceptance_rate: accepted drafts / drafts.
        tokens_per_round: new tokens / rounds.
        exit_layer: layers that drafted.
        num_layers: layers of the model.
        num_speculations: drafts a round.
    """
    text = f"Self-speculative decoding ran at {ratio:.2f} times the speed of autoregressive decoding."
    if ratio >= 1:
        return text
    if not drafted:
        return f"{text} Nothing was drafted, so it could gain nothing."
    text += (
        f" It was slower because {acceptance_rate:.1%} of the drafts were accepted, {tokens_per_round:.2f} tokens a "
        f"round: too few to pay for rounds of {num_speculations} drafts by {exit_layer} of {num_layers} layers, and "
        "their check."
    )
    if acceptance_rate < 0.5:
        text += (
            " Layers draft well only if the model was trained to exit early, as LayerSkip checkpoints are; this "
            "model's first layers seldom name the token that the whole model picks."
        )
    return text


def histogram_line(accept_histogram: Sequence[int]) -> str:
    """Rounds by the number of drafts that they kept, from 0."""
    bins = ", ".join(f"{kept}: {count}" for kept, count in enumerate(accept_histogram))
    return f"rounds by accepted drafts: {bins}"
