"""AdamW with a schedule, clipping and frozen parts: what optax has, put together."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from lsjax.checks import check_choice, check_int, check_number
from lsjax.params import Params

SCHEDULES = ("cosine", "linear", "constant")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW (arXiv 1711.05101) on gradients whose global norm is clipped.

    Attributes:
        learning_rate: its peak.
        schedule: what comes after the warm-up: ``"cosine"`` or ``"linear"`` down to ``final_share`` of the peak at the
            last step, or ``"constant"``.
        warmup_steps: steps over which it rises from 0 to the peak.
        final_share: what is left of the peak at the end, in 0..1.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        epsilon: what is added to the root of the latter.
        weight_decay: of matrices; norms and biases do not decay.
        clip_norm: the largest norm of all gradients together; 0: they are not clipped.
        frozen: parts of the tree that stay as they are, such as ``("embed_tokens", "lm_head")`` or ``("layers_0",)``.

    Raises:
        ValueError: says what was expected and what came.
    """

    learning_rate: float = 3e-4
    schedule: str = "cosine"
    warmup_steps: int = 0
    final_share: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_int("warmup_steps", self.warmup_steps, 0)
        for name in ("learning_rate", "weight_decay", "clip_norm", "epsilon"):
            check_number(name, getattr(self, name), 0)
        for name in ("final_share", "beta1", "beta2"):
            check_number(name, getattr(self, name), 0, 1)
        if isinstance(self.frozen, str) or not all(isinstance(name, str) for name in self.frozen):
            raise ValueError(f"frozen: expected names of parts of the model, got {self.frozen!r}")
        object.__setattr__(self, "frozen", tuple(self.frozen))

    def learning_rates(self, steps: int) -> optax.Schedule:
        """The learning rate of each step, counted from 0, of so many."""
        peak, rest = self.learning_rate, max(steps - self.warmup_steps, 1)
        after = {
            "cosine": optax.cosine_decay_schedule(peak, rest, alpha=self.final_share),
            "linear": optax.linear_schedule(peak, peak * self.final_share, rest),
            "constant": optax.constant_schedule(peak),
        }[self.schedule]
        if not self.warmup_steps:
            return after
        # Above 0 from the first step on: a step at a rate of 0 would be lost.
        warmup = optax.linear_schedule(peak / (self.warmup_steps + 1), peak, self.warmup_steps)
        return optax.join_schedules([warmup, after], [self.warmup_steps])

    def check(self, params: Params) -> None:
        """That the model has the parts that are to be frozen.

        Raises:
            ValueError: names the others.
        """
        if unknown := [name for name in self.frozen if name not in params.tree]:
            there = ", ".join(params.tree)
            raise ValueError(f"frozen: expected parts of the model ({there}), got {', '.join(unknown)}")

    def transformation(self, steps: int) -> optax.GradientTransformation:
        """What turns the gradients of a tree in Flax naming into its updates; frozen parts have no state."""
        adamw = optax.adamw(
            self.learning_rates(steps),
            b1=self.beta1,
            b2=self.beta2,
            eps=self.epsilon,
            weight_decay=self.weight_decay,
            mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree),
        )
        clip = optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity()
        trained = optax.chain(clip, adamw)
        if not self.frozen:
            return trained
        parts: dict[Any, optax.GradientTransformation] = {"trained": trained, "frozen": optax.set_to_zero()}
        return optax.partition(parts, self._labels)

    def freeze(self, tree: dict[str, Any]) -> dict[str, Any]:
        """The same tree, through whose frozen parts no gradient flows; so none is computed, nor counted in the norm."""
        return {name: jax.lax.stop_gradient(part) if name in self.frozen else part for name, part in tree.items()}

    def _labels(self, tree: dict[str, Any]) -> dict[str, Any]:
        return {name: "frozen" if name in self.frozen else "trained" for name in tree}
