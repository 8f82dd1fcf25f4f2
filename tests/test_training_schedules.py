"""Rates of layer dropout, weights of exits, curricula and schedules, by numbers worked out by hand."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from lsjax.training.curriculum import EarlyExitLoss
from lsjax.training.dropout import DEPTHS, LayerDropout, draw_kept
from lsjax.training.optimizer import Optimizer


@pytest.mark.parametrize(
    ("depth", "expected"),
    [
        ("exponential", [0, 0.037841, 0.082843, 0.136359, 0.2]),  # 0.2 (2^(l/4) - 1)
        ("uniform", [0.2] * 5),
        ("linear", [0, 0.05, 0.1, 0.15, 0.2]),
        ("log", [0, 0.086135, 0.136521, 0.172271, 0.2]),  # 0.2 ln(l + 1) / ln 5
        ("sin", [0, 0.076537, 0.141421, 0.184776, 0.2]),
        ("sigmoid", [0.001339, 0.015172, 0.1, 0.184828, 0.198661]),  # at -5, -2.5, 0, 2.5, 5
    ],
)
def test_dropout_grows_with_depth(depth, expected):
    dropout = LayerDropout(rate=0.2, depth=depth)
    np.testing.assert_allclose(dropout.depth_rates(5), expected, atol=1e-6)
    np.testing.assert_allclose(dropout.rates(5, 3, 10), expected, atol=1e-6)


@pytest.mark.parametrize("depth", DEPTHS)
def test_every_profile_is_a_probability_at_any_depth(depth):
    for layers in (1, 2, 32):
        rates = LayerDropout(rate=1.0, depth=depth).depth_rates(layers)
        assert len(rates) == layers
        assert ((rates >= 0) & (rates <= 1)).all()
        assert (np.diff(rates) >= 0).all()


def test_dropout_grows_over_training_from_scratch():
    dropout = LayerDropout(rate=0.2, depth="uniform", time="exponential")
    found = [float(dropout.rates(1, step, 5)[0]) for step in range(5)]
    np.testing.assert_allclose(found, [0, 0.037841, 0.082843, 0.136359, 0.2], atol=1e-6)
    traced = jax.jit(lambda step: dropout.rates(1, step, 5))(2)
    np.testing.assert_allclose(traced, [0.082843], atol=1e-6)
    assert float(dropout.rates(1, 0, 1)[0]) == 0  # a training of one step


def test_samples_are_drawn_one_by_one():
    rates = LayerDropout(rate=0.5, depth="linear").rates(3, 0, 1)  # 0, 0.25, 0.5
    kept = np.asarray(draw_kept(jax.random.key(0), rates, 20_000))
    assert kept.shape == (3, 20_000)
    assert kept[0].all()
    np.testing.assert_allclose(kept.mean(axis=1), [1, 0.75, 0.5], atol=0.015)  # 4 standard deviations
    both = (kept[1] & kept[2]).mean()
    assert abs(both - 0.375) < 0.015  # layers are independent
    assert not draw_kept(jax.random.key(0), LayerDropout(rate=1.0, depth="uniform").rates(3, 0, 1), 1000).any()


def test_exit_weights():
    np.testing.assert_allclose(EarlyExitLoss(scale=1.0).exit_weights(5), [0, 1, 3, 6, 10])  # 4 + (0 + 1 + 2 + 3)
    np.testing.assert_allclose(EarlyExitLoss(scale=0.2).exit_weights(5), [0, 0.2, 0.6, 1.2, 5.2])
    np.testing.assert_allclose(EarlyExitLoss(scale=0.0).exit_weights(3), [0, 0, 2])
    np.testing.assert_allclose(EarlyExitLoss(scale=1.0).exit_weights(1), [1])
    normalised = EarlyExitLoss(scale=1.0, curriculum="all").weights(5, 7, 100)
    np.testing.assert_allclose(normalised, [0, 0.05, 0.15, 0.3, 0.5], rtol=1e-6)


def test_weights_are_normalised_over_the_exits_that_are_on():
    rotational = EarlyExitLoss(scale=1.0, curriculum="rotational", period=2)
    np.testing.assert_allclose(rotational.weights(5, 0, 100), [0, 0, 3 / 13, 0, 10 / 13], rtol=1e-6)
    np.testing.assert_allclose(rotational.weights(5, 1, 100), [0, 1 / 17, 0, 6 / 17, 10 / 17], rtol=1e-6)


def exits_over_time(loss, layers, steps):
    on = jax.vmap(functools.partial(loss.exits_on, layers, steps=steps))(np.arange(steps))
    return ["".join(".x"[int(flag)] for flag in row) for row in np.asarray(on)]


def test_the_rotational_curriculum():
    loss = EarlyExitLoss(curriculum="rotational", period=3)
    assert exits_over_time(loss, 7, 5) == ["x..x..x", ".x..x.x", "..x..xx", "x..x..x", ".x..x.x"]
    assert exits_over_time(EarlyExitLoss(curriculum="rotational", period=1), 3, 2) == ["xxx", "xxx"]
    assert exits_over_time(EarlyExitLoss(curriculum="rotational", period=8), 3, 4) == ["x.x", ".xx", "..x", "..x"]


def test_the_gradual_curriculum():
    loss = EarlyExitLoss(curriculum="gradual")
    # T / 2L = 2: one more exit every second step, from the last layer down; all of them before the middle.
    assert exits_over_time(loss, 4, 16) == ["...x"] * 2 + ["..xx"] * 2 + [".xxx"] * 2 + ["xxxx"] * 10
    # floor(2 L t / T) where L does not divide T: 0, 0, 1, 2, 3, ... for L = 3, T = 7
    assert exits_over_time(loss, 3, 7) == ["..x", "..x", ".xx", "xxx", "xxx", "xxx", "xxx"]
    later = np.asarray(loss.exits_on(80, 10**9, 2 * 10**9))  # no overflow
    assert later.all()


def test_all_exits_are_on_without_a_curriculum():
    assert exits_over_time(EarlyExitLoss(curriculum="all"), 3, 3) == ["xxx"] * 3


def test_learning_rates():
    def found(steps, at, **given):
        rates: Any = Optimizer(**given).learning_rates(steps)
        return [float(rates(step)) for step in at]

    linear = found(12, (0, 1, 3, 4, 8, 12), learning_rate=1.0, schedule="linear", warmup_steps=4, final_share=0.5)
    np.testing.assert_allclose(linear, [0.2, 0.4, 0.8, 1, 0.75, 0.5])
    cosine = found(10, (0, 5, 10), learning_rate=2.0, schedule="cosine", final_share=0.1)
    np.testing.assert_allclose(cosine, [2.0, 1.1, 0.2], rtol=1e-6)
    assert found(10, (0, 1, 9), learning_rate=2.0, schedule="constant", warmup_steps=1) == [1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (LayerDropout, {"rate": 1.5}, r"rate: expected a number in 0\.\.1, got 1\.5"),
        (LayerDropout, {"rate": float("nan")}, "rate: expected a number"),
        (LayerDropout, {"rate": True}, "rate: expected a number"),
        (LayerDropout, {"rate": 0.1, "depth": "exp"}, "depth: expected one of 'exponential', 'uniform'"),
        (LayerDropout, {"rate": 0.1, "time": "linear"}, "time: expected one of"),
        (EarlyExitLoss, {"scale": -1.0}, "scale: expected a number of at least 0, got -1"),
        (EarlyExitLoss, {"curriculum": "rotating"}, "curriculum: expected one of 'all', 'rotational', 'gradual'"),
        (EarlyExitLoss, {"period": 0}, "period: expected an int of at least 1, got 0"),
        (Optimizer, {"learning_rate": "1e-3"}, "learning_rate: expected a number of at least 0, got '1e-3'"),
        (Optimizer, {"schedule": "step"}, "schedule: expected one of 'cosine', 'linear', 'constant', got 'step'"),
        (Optimizer, {"frozen": "embed_tokens"}, "frozen: expected names of parts"),
    ],
)
def test_bad_values_are_refused(kind, given, message):
    with pytest.raises(ValueError, match=message):
        kind(**given)
