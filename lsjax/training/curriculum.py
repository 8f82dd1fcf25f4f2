"""Which exits have a loss, and how much it counts (section 4.2 of arXiv 2404.16710)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lsjax.checks import check_choice, check_int, check_number

CURRICULA = ("all", "rotational", "gradual")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlyExitLoss:
    """The weights of the exits' losses: ``e(l)`` of those that are on at a step, divided by their sum.

    Exit l is read after layer l, counted from 0, from its output; exit L - 1 is the whole model and always on.

    Attributes:
        scale: e_scale, at least 0: how much the early exits count beside the last layer. The paper takes 0.2 for
            pretraining and 1.0 for finetuning.
        curriculum: ``"all"``: every exit at every step; ``"rotational"``: every ``period``-th, one further at each
            step, so that a step pays for few heads; ``"gradual"``: from the last layer down to the first, one more
            every T / 2L steps, all of them from the middle of training on.
        period: R of the rotation.

    Raises:
        ValueError: says what was expected and what came.
    """

    scale: float = 1.0
    curriculum: str = "rotational"
    period: int = 8

    def __post_init__(self) -> None:
        check_number("scale", self.scale, 0)
        check_choice("curriculum", self.curriculum, CURRICULA)
        check_int("period", self.period, 1)

    def exit_weights(self, num_layers: int) -> np.ndarray:
        """float64 ``[layers]``: e, not normalised.

        ``e(l) = scale (0 + 1 + ... + l)`` before the last layer, and ``(L - 1) + scale (0 + ... + (L - 2))`` for it. So
        the exit after the very first layer counts nothing. A model of one layer has the weight 1.
        """
        if num_layers == 1:
            return np.ones(1)
        weights = self.scale * np.cumsum(np.arange(num_layers, dtype=np.float64))
        weights[-1] = num_layers - 1 + weights[-2]
        return weights

    def exits_on(self, num_layers: int, step: jax.Array | int, steps: int) -> jax.Array:
        """bool ``[layers]``: which exits are on at a step, counted from 0, of so many; the step may be traced."""
        layers, step = jnp.arange(num_layers), jnp.asarray(step, jnp.int32)
        if self.curriculum == "rotational":
            on = (layers - step) % self.period == 0
        elif self.curriculum == "gradual":
            # One exit more where floor(2 L t / T) grows, by a table: the product may not fit 32 bits.
            begins = [-(-exit * steps // (2 * num_layers)) for exit in range(num_layers)]
            on = step >= jnp.asarray(begins[::-1], jnp.int32)
        else:
            on = layers >= 0
        return on | (layers == num_layers - 1)

    def weights(self, num_layers: int, step: jax.Array | int, steps: int) -> jax.Array:
        """float32 ``[layers]``: the weights at a step, 0 for exits that are off; their sum is 1."""
        weights = jnp.asarray(self.exit_weights(num_layers), jnp.float32) * self.exits_on(num_layers, step, steps)
        return weights / weights.sum()
