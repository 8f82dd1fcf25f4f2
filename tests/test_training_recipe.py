"""The training step: forward pass, losses and gradients against NumPy float64, and what may change the weights."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import quickly_compiled
from training import CONFIG, LAYERS, LENGTH, DroppingLlama, packed, small_params

import lsjax
from lsjax.params import flatten, unflatten
from lsjax.training.batch import IGNORED
from lsjax.training.curriculum import EarlyExitLoss
from lsjax.training.dropout import LayerDropout
from lsjax.training.forward import layer_outputs
from lsjax.training.losses import exit_logits, exit_losses, head_weights, weighted_losses
from lsjax.training.optimizer import Optimizer
from lsjax.training.recipe import Recipe, compiler_options, gradients, init_state, train_step

ALL_ON = np.full(LAYERS, 1 / LAYERS, np.float32)
DROPPED = np.array([[1, 0, 1], [0, 0, 1], [1, 0, 0]], bool)  # [layers, rows]


@pytest.fixture(scope="module")
def params():
    return small_params()


@pytest.fixture
def batch():
    return packed([[14], [5, 9], [1, 6, 7]])


FAST = {"xla_backend_optimization_level": 0}  # to compile; each program runs once or twice


@functools.partial(jax.jit, static_argnames="remat", compiler_options=FAST)
def outputs(params, batch, kept=None, remat=False):
    return jnp.stack(list(layer_outputs(params, batch, kept, remat=remat)))


@functools.partial(jax.jit, static_argnames=("chunk", "remat", "dtype"), compiler_options=FAST)
def weighted(tree, batch, weights, kept=None, chunk=4, remat=False, dtype=None):
    """The loss, each exit's, and the gradient."""
    count = jnp.maximum((batch.labels != IGNORED).sum(), 1)

    def loss(tree):
        params = lsjax.Params(CONFIG, tree)
        every = [True] * LAYERS
        options = {"possible": every, "kept": kept, "chunk": chunk, "remat": remat, "dtype": dtype}
        total, losses = exit_losses(params, batch, weights, **options)
        return total / count, losses / count

    return jax.value_and_grad(loss, has_aux=True)(tree)


def test_every_exit_reads_each_document_alone(params, batch):
    expected = DroppingLlama(params).exits(batch)
    hidden = outputs(params, batch)
    found = jax.jit(lambda hidden: exit_logits(CONFIG, head_weights(params), hidden))(hidden)
    np.testing.assert_allclose(found, expected, atol=2e-4)


def test_one_document_a_row_is_what_inference_computes(params):
    batch = packed([[LENGTH], [LENGTH]])
    found = jax.jit(lambda hidden: exit_logits(CONFIG, head_weights(params), hidden))(outputs(params, batch))
    expected = lsjax.forward(params, batch.tokens, exits=range(1, LAYERS + 1))
    np.testing.assert_allclose(found, np.stack(expected), atol=2e-4)


def test_dropped_samples_pass_a_layer_unchanged(params, batch):
    found = np.asarray(outputs(params, batch, DROPPED))
    embedded = np.asarray(params.tree["embed_tokens"]["embedding"])[batch.tokens]
    before = np.concatenate([embedded[None], found[:-1]])
    np.testing.assert_array_equal(found[~DROPPED], before[~DROPPED])
    assert (found[DROPPED] != before[DROPPED]).any(axis=(1, 2)).all()
    logits = jax.jit(lambda hidden: exit_logits(CONFIG, head_weights(params), hidden))(found)
    np.testing.assert_allclose(logits, DroppingLlama(params).exits(batch, DROPPED), atol=2e-4)


def test_a_rate_of_one_is_the_identity(params, batch):
    recipe = Recipe(steps=1, batch_size=3, layer_dropout=LayerDropout(rate=1.0, depth="uniform"))
    found = outputs(params, batch, np.zeros((LAYERS, 3), bool))
    embedded = np.asarray(params.tree["embed_tokens"]["embedding"])[batch.tokens]
    np.testing.assert_array_equal(found, np.broadcast_to(embedded, found.shape))
    grads, _, _ = quickly_compiled(functools.partial(gradients, recipe))(params, batch, 0)
    sizes = {path: float(jnp.abs(leaf).max()) for path, leaf in flatten(grads).items()}
    assert {path for path, size in sizes.items() if size} == {
        "embed_tokens/embedding",
        "lm_head/kernel",
        "norm/scale",
    }


def test_losses_of_all_exits(params, batch):
    batch.labels[0, 3:6] = IGNORED
    for kept in (None, DROPPED):
        (loss, losses), _ = weighted(params.tree, batch, ALL_ON, kept)
        expected = DroppingLlama(params).losses(batch, kept)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)


def test_gradients_are_the_slopes_of_the_loss(params, batch):
    """Along random directions, against differences of the loss in float64."""
    rng = np.random.default_rng(1)
    weights = np.array([0.3, 0, 0.7], np.float32)
    _, grads = weighted(params.tree, batch, weights, DROPPED)
    grads = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(grads).items()}
    for part in ("embed", "head", "norm", "self_attn", "mlp", ""):
        direction = {path: rng.normal(size=leaf.shape) * (part in path) for path, leaf in grads.items()}
        ends = []
        for sign in (1, -1):
            oracle = DroppingLlama(params)
            oracle.weights = {path: leaf + sign * 1e-5 * direction[path] for path, leaf in oracle.weights.items()}
            ends.append(weights @ oracle.losses(batch, DROPPED))
        slope = (ends[0] - ends[1]) / 2e-5
        np.testing.assert_allclose(sum(np.vdot(grads[path], direction[path]) for path in grads), slope, rtol=1e-3)


@pytest.mark.parametrize("exit_", [0, 1])
def test_an_exit_teaches_only_the_layers_before_it(params, batch, exit_):
    weights = np.zeros(LAYERS, np.float32)
    weights[exit_] = 1
    (_, losses), grads = weighted(params.tree, batch, weights)
    assert losses[exit_] > 0
    assert np.flatnonzero(losses).tolist() == [exit_]  # the others are not computed
    for path, leaf in flatten(grads).items():
        layer = int(path.split("/")[0].removeprefix("layers_")) if path.startswith("layers_") else -1
        assert bool(jnp.abs(leaf).max() > 0) == (layer <= exit_), path


def test_the_last_loss_is_on_the_last_layers_output(params, batch):
    recipe = Recipe(steps=1, batch_size=3)
    grads, losses, labels = quickly_compiled(functools.partial(gradients, recipe))(params, batch, 0)
    np.testing.assert_allclose(losses[-1], DroppingLlama(params).losses(batch)[-1], rtol=1e-5)
    assert labels == (batch.labels != IGNORED).sum()
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def test_a_layer_that_all_samples_pass_by_learns_nothing(params, batch):
    kept = np.ones((LAYERS, 3), bool)
    kept[1] = False
    _, grads = weighted(params.tree, batch, ALL_ON, kept)
    for path, leaf in flatten(grads).items():
        assert bool(jnp.abs(leaf).max() > 0) == (not path.startswith("layers_1/")), path


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 7, 100, None])
def test_chunks_change_neither_the_loss_nor_its_gradient(batch, chunk, tie):
    """Against the plain loss of all logits at once, differentiated by JAX."""
    params = small_params(tie_word_embeddings=tie)
    hidden = jax.random.normal(jax.random.key(0), (3, 3, LENGTH, CONFIG.hidden_size))
    weights = jnp.array([0.25, 0, 2.0])
    batch.labels[1, 4:12] = IGNORED

    def plain(head, hidden):
        log_probs = jax.nn.log_softmax(exit_logits(params.config, head, hidden))
        valid = batch.labels != IGNORED
        picked = jnp.take_along_axis(log_probs, jnp.where(valid, batch.labels, 0)[None, ..., None], axis=-1)[..., 0]
        losses = -(picked * valid).sum((1, 2))
        return 3 * jnp.vdot(weights, losses), losses * (weights > 0)

    def chunked(head, hidden):
        found: Any = weighted_losses(params.config, chunk, None, head, hidden, batch.labels, weights)
        total, losses = found
        return 3 * total, losses

    head = head_weights(params)
    both = [
        quickly_compiled(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(head, hidden)
        for loss in (plain, chunked)
    ]
    jax.tree.map(lambda plain, found: np.testing.assert_allclose(found, plain, rtol=3e-5, atol=3e-5), *both)
    assert float(both[0][0][0]) > 0
    undifferentiated = quickly_compiled(chunked)(head, hidden)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), undifferentiated, both[1][0])


def test_rematerialisation_changes_nothing(params, batch):
    plain, again = (weighted(params.tree, batch, ALL_ON, DROPPED, remat=remat) for remat in (False, True))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), plain, again)


def test_rematerialisation_saves_memory():
    """In the compiled step, of a deep model; the numbers of a run of it are another test's."""
    params = small_params(num_hidden_layers=12)
    batch = packed([[64]] * 16)

    def temporaries(remat: bool) -> int:
        recipe = Recipe(steps=10, batch_size=16, remat=remat, loss_chunk=16)
        step = jax.jit(
            functools.partial(train_step, recipe), donate_argnums=0, compiler_options=compiler_options(recipe)
        )
        found: Any = step.lower(init_state(recipe, params), batch).compile().memory_analysis()
        return found.temp_size_in_bytes

    assert temporaries(True) < 0.4 * temporaries(False)


def test_a_batch_without_labels_has_no_loss_and_no_gradient(params, batch):
    empty = batch._replace(labels=np.full_like(batch.labels, IGNORED))
    recipe = Recipe(steps=4, batch_size=3, early_exit=EarlyExitLoss(curriculum="all"))
    grads, losses, labels = quickly_compiled(functools.partial(gradients, recipe))(params, empty, 0)
    assert labels == 0
    assert not losses.any()
    assert not any(leaf.any() for leaf in jax.tree.leaves(grads))
    optimizer = Optimizer(learning_rate=0.1, schedule="constant", weight_decay=0.5)
    recipe = dataclasses.replace(recipe, optimizer=optimizer)
    state, metrics = quickly_compiled(functools.partial(train_step, recipe))(init_state(recipe, params), empty)
    assert (metrics.loss, metrics.grad_norm, metrics.labels) == (0, 0, 0)
    for path, leaf in flatten(state.params.tree).items():  # matrices decay, norms do not
        share = 0.95 if leaf.ndim > 1 else 1
        np.testing.assert_allclose(leaf, share * flatten(params.tree)[path], rtol=1e-6)


def test_accumulation_is_exact(params):
    """Parts with unequal numbers of labels, and dropout: the update is that of the whole batch."""
    batch = packed([[14], [5, 9], [1, 6, 7], [2] * 7, [1] * 14, [13, 1], [7, 7], [4, 10]])
    batch.labels[1, 2:] = IGNORED
    recipe = Recipe(
        steps=8, batch_size=8, layer_dropout=LayerDropout(rate=0.5), early_exit=EarlyExitLoss(curriculum="all")
    )
    whole = quickly_compiled(functools.partial(gradients, recipe))(params, batch, 3)
    for parts in (2, 8):
        recipe = dataclasses.replace(recipe, accumulation=parts)
        found = quickly_compiled(functools.partial(gradients, recipe))(params, batch, 3)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), whole, found)


def test_bfloat16_computes_but_sums_in_float32(params, batch):
    exact, rough = (weighted(params.tree, batch, ALL_ON, DROPPED, dtype=dtype) for dtype in (None, jnp.bfloat16))
    np.testing.assert_allclose(rough[0][0], exact[0][0], rtol=0.03)
    for path, leaf in flatten(rough[1]).items():
        plain = flatten(exact[1])[path]
        assert leaf.dtype == jnp.float32
        assert jnp.linalg.norm(leaf - plain) < 0.1 * jnp.linalg.norm(plain), path
    hidden = jax.eval_shape(functools.partial(layer_outputs_of, jnp.bfloat16), params, batch)
    assert {leaf.dtype for leaf in hidden} == {jnp.dtype("bfloat16")}


def layer_outputs_of(dtype, params, batch):
    return list(layer_outputs(params, batch, dtype=dtype))


def test_gradients_of_a_frequent_token_are_summed_in_float32(params):
    """512 times the same small gradient: a sum in bfloat16 would stop growing on the way."""
    batch = packed([[8] * 8] * 8)
    batch.tokens[:] = 3
    batch.labels[:] = 5
    flat = {path: jnp.zeros_like(leaf) if "_proj" in path else leaf for path, leaf in flatten(params.tree).items()}
    grads = [
        weighted(unflatten(flat), batch, ALL_ON, dtype=dtype)[1]["embed_tokens"]["embedding"][3]
        for dtype in (None, jnp.bfloat16)
    ]
    np.testing.assert_allclose(grads[1], grads[0], rtol=0.05, atol=0.02 * float(jnp.abs(grads[0]).max()))


def test_frozen_parts_stay_and_have_no_state(params, batch):
    optimizer = Optimizer(learning_rate=0.1, frozen=("embed_tokens", "layers_1"))
    recipe = Recipe(steps=4, batch_size=3, optimizer=optimizer)
    state = init_state(recipe, params)
    after, metrics = quickly_compiled(functools.partial(train_step, recipe))(state, batch)
    for path, leaf in flatten(after.params.tree).items():
        frozen = path.startswith(("embed_tokens/", "layers_1/"))
        assert bool((leaf == flatten(params.tree)[path]).all()) == frozen, path
    trained = {path: leaf for path, leaf in flatten(params.tree).items() if not path.startswith(("embed", "layers_1/"))}
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    assert moments == 2 * sum(leaf.size for leaf in trained.values())
    grads, _, _ = quickly_compiled(functools.partial(gradients, recipe))(params, batch, 0)
    norm = np.sqrt(sum(float((leaf**2).sum()) for path, leaf in flatten(grads).items() if path in trained))
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-4)
    with pytest.raises(ValueError, match=r"frozen: expected parts of the model \(.*\), got embedding"):
        init_state(dataclasses.replace(recipe, optimizer=Optimizer(frozen=("embedding",))), params)


def test_what_is_random_follows_from_seed_and_step(params, batch):
    recipe = Recipe(steps=100, batch_size=3, layer_dropout=LayerDropout(rate=0.5, depth="uniform"))
    found = {}
    for seed in (0, 1):
        run = quickly_compiled(functools.partial(gradients, dataclasses.replace(recipe, seed=seed)))
        found |= {(seed, step): [float(run(params, batch, step)[1][-1]) for _ in range(2)] for step in (0, 1)}
    assert all(first == again for first, again in found.values())
    assert len({first for first, _ in found.values()}) == 4


def test_wrong_batches_and_recipes_are_refused(params, batch):
    with pytest.raises(ValueError, match="batch: expected 4 rows, got 3"):
        gradients(Recipe(steps=1, batch_size=4), params, batch, 0)
    with pytest.raises(ValueError, match="accumulation: expected a divisor of batch_size 4, got 3"):
        Recipe(steps=1, batch_size=4, accumulation=3)
    with pytest.raises(ValueError, match="dtype: expected one of 'float32', 'bfloat16', got 'float16'"):
        Recipe(steps=1, batch_size=4, dtype="float16")
    with pytest.raises(ValueError, match="steps: expected an int of at least 1, got 0"):
        Recipe(steps=0, batch_size=4)
