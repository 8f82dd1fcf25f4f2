"""The parts of a round, timed alone: what is run is what a round runs, and what is derived from the times is right."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from oracle import CONFIG
from support import random_params

import lsjax
from lsjax.measure import steps
from lsjax.measure.bandwidth import step_bytes
from lsjax.measure.timing import Spread

LENGTH, DRAFTS = 5, 3


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, 3)


def written(loop: steps.Loop) -> list[int]:
    """For each layer, how many positions of its cache a call writes."""
    _, cache = loop()
    return [int((np.abs(np.asarray(layer.key)).sum(axis=(0, 1, 3)) > 0).sum()) for layer in cache]


def test_parts_run_their_layers_over_their_positions(params):
    model = lsjax.prepare(params)
    layers, turn = CONFIG.num_hidden_layers, steps.COUNT
    every = turn * (DRAFTS + 1)
    assert written(steps.autoregressive_step(model, length=LENGTH)) == [turn] * layers
    assert written(steps.drafting(model, 2, 0, length=LENGTH)) == [turn] * 2 + [0] * (layers - 2)
    assert written(steps.drafting(model, 2, DRAFTS, length=LENGTH)) == [every] * 2 + [0] * (layers - 2)
    assert written(steps.verification(model, 2, DRAFTS, length=LENGTH)) == [0] * 2 + [every] * (layers - 2)
    whole = written(steps.speculative_round(model, 2, DRAFTS, length=LENGTH))
    assert turn + DRAFTS <= whole[0] <= every
    assert whole == whole[:1] * layers


def test_a_loop_starts_anew_at_each_call(params):
    loop = steps.autoregressive_step(params, length=LENGTH, batch=2)
    first, again = (jax.tree.map(np.asarray, loop()) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, again)


def test_a_capacity_too_small_is_refused(params):
    with pytest.raises(ValueError, match="capacity"):
        steps.autoregressive_step(params, length=LENGTH, capacity=LENGTH)


@pytest.mark.parametrize(("form", "tied"), list(itertools.product(("plain", "prepared"), (True, False))))
def test_products_are_all_the_weights(form, tied):
    params = random_params(dataclasses.replace(CONFIG, tie_word_embeddings=tied), 0)
    model = lsjax.prepare(params) if form == "prepared" else params
    calls = steps.matrix_products(model, 2)
    kinds = {"plain": 8, "prepared": 5}[form]
    assert len(calls) == kinds
    layers, width = CONFIG.num_hidden_layers, CONFIG.hidden_size
    norms = (2 * layers + 1) * width * 4
    for found in calls.values():
        assert found.count % len(found.weights) == 0
        assert np.isfinite(np.asarray(found())).all()
    read = sum(weight.nbytes for found in calls.values() for weight in found.weights)
    assert read == step_bytes(model) - norms


def spread(value: float) -> Spread:
    return Spread((value,))


def test_what_follows_from_the_costs():
    costs = steps.RoundCosts(
        exit_layer=1,
        num_speculations=4,
        autoregressive=spread(10.0),
        last_draft=spread(2.0),
        drafting=spread(14.0),
        verification=spread(16.0),
        round=spread(31.0),
        products={},
        bandwidth=1.0,
        step_bound=8.0,
        round_bound=28.0,
    )
    assert costs.draft_step == 3.0
    assert costs.predicted_round == 30.0
    assert costs.tokens_per_round(0.75) == 4.0
    assert costs.speed_up(4.0) == pytest.approx(4 / 3)
    assert costs.to_dict()["round"]["median"] == 31.0


def test_round_costs_bound_a_round_by_its_products_and_its_cache(params, monkeypatch):
    monkeypatch.setattr(steps, "read_bandwidth", lambda *_, **__: 1e3)

    def product_seconds(timings, products):
        kinds = dict.fromkeys(kind for kind, _ in products)
        return {kind: {1: 1.0 if kind == "head" else 0.125, 4: 2.0 if kind == "head" else 0.25} for kind in kinds}

    monkeypatch.setattr(steps, "_product_seconds", product_seconds)
    costs = steps.round_costs(lsjax.prepare(params), 2, DRAFTS, length=LENGTH, repetitions=1)
    layers = CONFIG.num_hidden_layers
    # Four kinds of matrices a layer: half a second for one position, one for four.
    products = (DRAFTS + 1) * 2 * 0.5 + DRAFTS * 1.0 + (layers - 2) * 1.0 + 2.0
    one_layer = 2 * CONFIG.num_key_value_heads * CONFIG.head_dim * LENGTH * 4
    cache = ((DRAFTS + 1) * 2 + layers - 2) * one_layer / 1e3
    assert costs.round_bound == pytest.approx(products + cache)
    assert costs.step_bound == step_bytes(lsjax.prepare(params), positions=[LENGTH]) / 1e3
    assert costs.round.median > 0
