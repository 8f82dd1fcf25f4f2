"""Layer dropout: rates that grow with depth and, where wanted, over training (section 4.1 of arXiv 2404.16710)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from lsjax.checks import check_choice, check_number

# D of a layer that is a share x of the way from the first to the last of n.
_DEPTHS: dict[str, Callable[[float, int], float]] = {
    "exponential": lambda x, n: 2**x - 1,
    "uniform": lambda x, n: 1.0,
    "linear": lambda x, n: x,
    "log": lambda x, n: math.log(1 + x * (n - 1)) / math.log(max(n, 2)),
    "sin": lambda x, n: math.sin(math.pi / 2 * x),
    "sigmoid": lambda x, n: 1 / (1 + math.exp(-10 * (x - 0.5))),
}
DEPTHS = tuple(_DEPTHS)
TIMES = ("constant", "exponential")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerDropout:
    """How often samples pass a layer by, ``p(l, t) = S(t) D(l) rate``, for layer l of L at step t of T, from 0.

    Attributes:
        rate: p_max, in 0..1. The paper takes 0.1 for pretraining and 0.2 for finetuning.
        depth: D. ``"exponential"``: the paper's ``exp(l ln 2 / (L - 1)) - 1``, 0 at the first layer and 1 at the last;
            ``"uniform"``: 1; with x = l / (L - 1), ``"linear"``: x; ``"log"``: ``ln(l + 1) / ln L``; ``"sin"``:
            ``sin(pi x / 2)``; ``"sigmoid"``: ``1 / (1 + exp(5 - 10 x))``.
        time: S. ``"constant"``: 1, for training that starts from a trained model; ``"exponential"``:
            ``exp(t ln 2 / (T - 1)) - 1``, 0 at the first step and 1 at the last, for training from scratch.

    Raises:
        ValueError: says what was expected and what came.
    """

    rate: float
    depth: str = "exponential"
    time: str = "constant"

    def __post_init__(self) -> None:
        check_number("rate", self.rate, 0, 1)
        check_choice("depth", self.depth, DEPTHS)
        check_choice("time", self.time, TIMES)

    def depth_rates(self, num_layers: int) -> np.ndarray:
        """float64 ``[layers]``: each layer's rate where S is 1."""
        profile, last = _DEPTHS[self.depth], max(num_layers - 1, 1)
        return self.rate * np.array([profile(layer / last, num_layers) for layer in range(num_layers)])

    def rates(self, num_layers: int, step: jax.Array | int, steps: int) -> jax.Array:
        """float32 ``[layers]``: each layer's rate at a step, which may be traced, of so many."""
        rates = jnp.asarray(self.depth_rates(num_layers), jnp.float32)
        if self.time == "constant":
            return rates
        return rates * jnp.expm1(jnp.asarray(step, jnp.float32) * np.float32(math.log(2) / max(steps - 1, 1)))


def draw_kept(key: jax.Array, rates: jax.Array, samples: int) -> jax.Array:
    """bool ``[layers, samples]``: whether each layer runs for each sample; rate 0 keeps all, rate 1 none.

    Args:
        key: a PRNG key.
        rates: float32 ``[layers]``.
        samples: how many.
    """
    return jax.random.uniform(key, (len(rates), samples)) >= rates[:, None]
