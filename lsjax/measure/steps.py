"""What the parts of a round cost, each in a compiled loop of its own, and what the machine bounds them by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lsjax.checks import check_depth, check_int, check_params
from lsjax.decode.options import Options
from lsjax.decode.round import Draft, draft, run_round, verify
from lsjax.decode.state import DecodeState, Plan, empty_stats, slack
from lsjax.measure.bandwidth import cache_bytes, read_bandwidth, step_bytes
from lsjax.measure.timing import Spread, Timings, time_in_turns
from lsjax.model.projection import dot
from lsjax.params import Model

COUNT = 16  # of the same part in one timed call, so that its start does not count


class Carry(flax.struct.PyTreeNode):
    """A loop's state, and the hidden states ``[batch, K + 1, hidden]`` through which each turn depends on the last."""

    state: DecodeState
    hidden: jax.Array


class Loop:
    """A part of decoding, run :data:`COUNT` times in one compiled loop on each call.

    It starts every time at the same length over a cache of zeros, which costs what any other cache costs.

    Args:
        body: the part; what it changes in the carry is what keeps XLA from leaving it out.
        params: the model.
        plan: of the state.
        batch: rows.
        length: committed tokens of each row at the start.
        capacity: tokens that the cache holds; None: what is needed.
        num_caches: layers' caches in the state; None: one for each layer.
    """

    def __init__(
        self,
        body: Callable[[Model, Carry], Carry],
        params: Model,
        plan: Plan,
        batch: int,
        length: int,
        capacity: int | None,
        num_caches: int | None = None,
    ) -> None:
        room = length + COUNT * (plan.num_speculations + 1)
        held = room if capacity is None else check_int("capacity", capacity, room)
        self._params, self._carry = params, _start(params, plan, batch, length, held, num_caches)

        def run(params: Model, carry: Carry, cache: Any) -> Carry:
            carry = carry.replace(state=carry.state.replace(cache=cache))
            return lax.fori_loop(0, COUNT, lambda _, carry: body(params, carry), carry)

        self._run = jax.jit(run, donate_argnums=2)
        self._cache = self._carry.state.cache
        self._carry = self._carry.replace(state=self._carry.state.replace(cache=()))

    def __call__(self) -> Any:
        """Runs the loop."""
        carry = self._run(self._params, self._carry, self._cache)
        self._cache = carry.state.cache
        return carry.hidden, self._cache

    @staticmethod
    def seconds_of(seconds: float) -> float:
        """Seconds of one part from those of a call."""
        return seconds / COUNT


def autoregressive_step(params: Model, *, batch: int = 1, length: int = 64, capacity: int | None = None) -> Loop:
    """A token of autoregressive decoding: all layers and the head for one position a row.

    Args:
        params: the model.
        batch: rows.
        length: committed tokens of each row at the start; :data:`COUNT` more follow.
        capacity: tokens that the cache holds; None: what is needed.
    """
    layers = _layers(params)
    return Loop(_whole_round, params, Plan(layers, layers, 0), batch, length, capacity)


def speculative_round(
    params: Model,
    exit_layer: int,
    num_speculations: int,
    *,
    batch: int = 1,
    length: int = 64,
    capacity: int | None = None,
) -> Loop:
    """A whole round of self-speculative decoding: draft, last draft, verification and commit."""
    plan = _plan(params, exit_layer, num_speculations)
    return Loop(_whole_round, params, plan, batch, length, capacity)


def drafting(
    params: Model,
    exit_layer: int,
    num_speculations: int,
    *,
    batch: int = 1,
    length: int = 64,
    capacity: int | None = None,
) -> Loop:
    """The early layers' part of a round: K draft steps, and the last draft, which runs without the head.

    With K = 0 it is the last draft alone, so draft steps cost what more of them cost more.
    """

    def body(params: Model, carry: Carry) -> Carry:
        state = carry.state
        drafted = draft(params, state)
        cache = drafted.cache + state.cache[drafted.exit_layer :]
        return Carry(_advance(state, cache), drafted.hidden)

    return Loop(body, params, _plan(params, exit_layer, num_speculations), batch, length, capacity)


def verification(
    params: Model,
    exit_layer: int,
    num_speculations: int,
    *,
    batch: int = 1,
    length: int = 64,
    capacity: int | None = None,
) -> Loop:
    """The deep layers' part of a round: layers ``[exit_layer, L)`` and the head over K + 1 positions."""

    def body(params: Model, carry: Carry) -> Carry:
        state = carry.state
        rows, width = state.tokens.shape[0], num_speculations
        early = state.cache[:exit_layer]
        drafted = Draft(jnp.zeros((rows, width), jnp.int32), state.draft_counts, None, carry.hidden, early, exit_layer)
        found = verify(params, state, drafted)
        hidden = carry.hidden + 1e-6 * found.targets[..., None].astype(carry.hidden.dtype)
        return Carry(_advance(state, early + found.cache), hidden.astype(carry.hidden.dtype))

    return Loop(body, params, _plan(params, exit_layer, num_speculations), batch, length, capacity)


def _whole_round(params: Model, carry: Carry) -> Carry:
    return carry.replace(state=run_round(params, carry.state))


def _advance(state: DecodeState, cache: Any) -> DecodeState:
    return state.replace(cache=cache, lengths=state.lengths + state.plan.num_speculations + 1)


def _start(params: Model, plan: Plan, batch: int, length: int, capacity: int, num_caches: int | None) -> Carry:
    slots = capacity + slack(plan)
    rows = jnp.zeros(batch, jnp.int32)
    shape = (batch, plan.num_speculations + 1, params.config.hidden_size)
    state = DecodeState(
        tokens=jax.random.randint(jax.random.key(0), (batch, slots), 0, params.config.vocab_size),
        lengths=rows + length,
        limits=rows + slots,  # nothing ends, and every round drafts in full
        done=rows > 0,
        eos=rows[:, None] - 1,
        pad=rows,
        begins=rows + length,
        draft_lengths=rows + plan.num_speculations,
        options=Options(),
        scores=None,
        cache=params.init_cache(batch, slots, num_caches or plan.num_layers),
        stats=empty_stats(batch, plan),
        plan=plan,
        config=params.config,
    )
    return Carry(state, jax.random.normal(jax.random.key(1), shape).astype(params.dtype))


def _plan(params: Model, exit_layer: int, num_speculations: int) -> Plan:
    depth = check_depth("exit_layer", exit_layer, params.config)
    return Plan(depth, _layers(params), check_int("num_speculations", num_speculations, 0))


def _layers(params: Model) -> int:
    check_params(params)
    return params.config.num_hidden_layers


class Products:
    """One kind of the model's matrix products alone: a call multiplies with each matrix in turn, some times over.

    Args:
        weights: each layer's matrix of this kind, as the model has it.
        transposed: see :func:`~lsjax.model.projection.dot`, like ``dtype``.
        rows: positions in one product, over the whole batch.
        repeats: how often all of them.
        dtype: of the result.
    """

    def __init__(self, weights: list[jax.Array], transposed: bool, rows: int, repeats: int, dtype: Any) -> None:
        self.weights, self.count = weights, repeats * len(weights)
        width = weights[0].shape[-1 if transposed else 0]
        self._x = jax.random.normal(jax.random.key(0), (rows, width)).astype(weights[0].dtype)

        def run(weights: list[jax.Array], x: jax.Array) -> jax.Array:
            def body(_: Any, x: jax.Array) -> jax.Array:
                for weight in weights:
                    out = dot(x, weight, transposed=transposed, dtype=dtype).reshape(rows, -1)
                    x = x + (1e-9 * out[:, :1]).astype(x.dtype)  # the next product has to wait for this one
                return x

            return lax.fori_loop(0, repeats, body, x)

        self._run = jax.jit(run)

    def __call__(self) -> jax.Array:
        """Multiplies; ``count`` products in all."""
        return self._run(self.weights, self._x)


def matrix_products(params: Model, rows: int) -> dict[str, Products]:
    """The model's matrix products alone, by kind: ``self_attn/o_proj``, ..., ``head``.

    Args:
        params: the model, plain or prepared: its own arrays in their own form.
        rows: positions in one product, over the whole batch.
    """
    layers = _layers(params)
    found = {}
    for part in ("self_attn", "mlp"):
        for name in params.tree["layers_0"][part]:
            held = [params.tree[f"layers_{layer}"][part][name] for layer in range(layers)]
            transposed = "weight" in held[0]
            weights = [module["weight" if transposed else "kernel"] for module in held]
            found[f"{part}/{name}"] = Products(weights, transposed, rows, max(1, 64 // layers), None)
    if "lm_head" in params.tree:
        transposed = "weight" in params.tree["lm_head"]
        head = params.tree["lm_head"]["weight" if transposed else "kernel"]
    else:
        transposed, head = True, params.tree["embed_tokens"]["embedding"]
    return found | {"head": Products([head], transposed, rows, 4, jnp.float32)}


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """What :func:`round_costs` returns; each a median with its repetitions, in seconds.

    Attributes:
        exit_layer: layers that draft.
        num_speculations: drafts a round, K.
        autoregressive: a token of autoregressive decoding.
        last_draft: the last draft of a round, without head.
        drafting: K draft steps and the last draft.
        verification: the deep layers and the head over K + 1 positions.
        round: all of a round.
        products: seconds of one matrix product, by kind and by rows.
        bandwidth: the largest read bandwidth seen, bytes a second.
        step_bound: what a token of autoregressive decoding takes at least: weights and cache over the bandwidth.
        round_bound: the sum of a round's products at their measured rates, and of its cache at the bandwidth.
    """

    exit_layer: int
    num_speculations: int
    autoregressive: Spread
    last_draft: Spread
    drafting: Spread
    verification: Spread
    round: Spread
    products: Mapping[str, Mapping[int, float]]
    bandwidth: float
    step_bound: float
    round_bound: float

    @property
    def draft_step(self) -> float:
        """Seconds of one draft step."""
        return (self.drafting.median - self.last_draft.median) / max(self.num_speculations, 1)

    @property
    def predicted_round(self) -> float:
        """Seconds of a round as the sum of its parts, measured alone."""
        return self.drafting.median + self.verification.median

    def speed_up(self, tokens_per_round: float) -> float:
        """The predicted speed over autoregressive decoding's: tokens a round times a token's cost over a round's."""
        return tokens_per_round * self.autoregressive.median / self.predicted_round

    def tokens_per_round(self, acceptance_rate: Any) -> Any:
        """Accepted drafts of all drafts, to tokens a round: those kept and one more."""
        return 1 + self.num_speculations * np.asarray(acceptance_rate)

    def to_dict(self) -> dict[str, Any]:
        """The numbers for JSON."""
        found = {
            field.name: value.to_dict() if isinstance(value, Spread) else value
            for field in dataclasses.fields(self)
            for value in [getattr(self, field.name)]
        }
        return found | {"draft_step": self.draft_step, "predicted_round": self.predicted_round}


def round_costs(
    params: Model,
    exit_layer: int,
    num_speculations: int,
    *,
    batch: int = 1,
    length: int = 64,
    capacity: int | None = None,
    repetitions: int = 7,
    progress: Callable[[Any, int], Any] | None = None,
) -> RoundCosts:
    """Times a round's parts, an autoregressive step, and the products that they consist of, all in turns.

    Args:
        params: the model; prepared, as it is best used.
        exit_layer: layers that draft.
        num_speculations: drafts a round, K, at least 1.
        batch: rows.
        length: committed tokens of each row at the start.
        capacity: tokens that the cache holds; None: what is needed.
        repetitions: timed calls of each.
        progress: see :func:`~lsjax.measure.timing.time_in_turns`.
    """
    drafts = check_int("num_speculations", num_speculations, 1)
    where: dict[str, Any] = {"batch": batch, "length": length, "capacity": capacity}
    parts = {
        "autoregressive": autoregressive_step(params, **where),
        "last_draft": drafting(params, exit_layer, 0, **where),
        "drafting": drafting(params, exit_layer, drafts, **where),
        "verification": verification(params, exit_layer, drafts, **where),
        "round": speculative_round(params, exit_layer, drafts, **where),
    }
    widths = (batch, batch * (drafts + 1))
    products = {(kind, rows): call for rows in widths for kind, call in matrix_products(params, rows).items()}
    calls = parts | products
    timings = time_in_turns(calls, repetitions=repetitions, progress=progress)
    one = _product_seconds(timings, products)
    bandwidth = read_bandwidth(jax.tree.leaves(params)[0].devices().pop(), repetitions=repetitions)

    layers, kinds = _layers(params), [kind for kind in one if kind != "head"]
    narrow, wide = (sum(one[kind][rows] for kind in kinds) for rows in widths)
    early = exit_layer * narrow
    passes = (drafts + 1) * cache_bytes(params, exit_layer, batch * length)
    deep = cache_bytes(params, layers, batch * length) - cache_bytes(params, exit_layer, batch * length)
    bound = drafts * (early + one["head"][widths[0]]) + early + (layers - exit_layer) * wide + one["head"][widths[1]]
    return RoundCosts(
        exit_layer=exit_layer,
        num_speculations=drafts,
        **{name: timings[name].seconds.map(Loop.seconds_of) for name in parts},
        products=one,
        bandwidth=bandwidth,
        step_bound=step_bytes(params, positions=[length] * batch) / bandwidth,
        round_bound=bound + (passes + deep) / bandwidth,
    )


def _product_seconds(timings: Timings, products: Mapping[tuple[str, int], Products]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for (kind, rows), calls in products.items():
        found.setdefault(kind, {})[rows] = timings[kind, rows].median / calls.count
    return found
