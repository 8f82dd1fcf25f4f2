"""``jax.vmap`` over prompts, keys, special ids and params: the tokens of the rows alone, at the cost of a batch."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracle import CONFIG, case
from support import random_params, temporaries_of

import lsjax
from lsjax.decode.folding import fold_rows
from lsjax.decode.generate import _generate
from lsjax.decode.prefill import start
from lsjax.decode.request import Request
from lsjax.decode.round import run_round
from lsjax.decode.state import Plan

pytestmark = pytest.mark.usefixtures("fewer_optimizations")

OPTIONS: Any = {"exit_layer": 2, "num_speculations": 3, "max_new_tokens": 16}
WIDTH = 12


@pytest.fixture(scope="module")
def data():
    return case(seed=0, deep_scale=0.3)


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.fixture(scope="module")
def batch(data):
    """All sixteen rows as one batch, and every id that ends a row somewhere in the middle."""
    eos = tuple(np.unique(data.texts[np.arange(16), data.lengths + 9]).tolist())
    out = lsjax.generate(data.params, data.prompts, prompt_lengths=data.lengths, eos_token_id=eos, **OPTIONS)
    ends = out.lengths - data.lengths
    assert 1 <= ends.min() < ends.max() <= 16
    return eos, out


def test_prompts_are_the_rows_of_a_batch(data, batch):
    eos, expected = batch

    def one(tokens, length):
        return lsjax.generate(data.params, tokens, prompt_lengths=length, eos_token_id=eos, **OPTIONS)

    # Two axes, prompts along the last of them, within the caller's own jit.
    mapped = jax.jit(jax.vmap(jax.vmap(one), in_axes=(2, 0)))
    found = mapped(data.prompts.reshape(4, 4, WIDTH).transpose(1, 2, 0), data.lengths.reshape(4, 4))
    assert found.tokens.shape == (4, 4, WIDTH + 16)
    assert_same(jax.tree.map(lambda x: x.reshape(16, *x.shape[2:]), found), expected)


@pytest.mark.slow
def test_keys_that_draw_prompts(data, batch):
    keys, eos = jax.random.split(jax.random.key(7), 16), batch[0]

    def draw(key):
        return jax.random.randint(key, (WIDTH,), 0, CONFIG.vocab_size)

    def experiment(key):
        return lsjax.generate(data.params, draw(key), eos_token_id=eos, **OPTIONS).stats.acceptance_rate

    expected = lsjax.generate(data.params, np.array([draw(key) for key in keys]), eos_token_id=eos, **OPTIONS)
    np.testing.assert_array_equal(jax.vmap(experiment)(keys), expected.stats.acceptance_rate)


def test_special_ids_are_each_mapped_row_s_own(data):
    row, start = 0, int(data.lengths[0])
    prompt = data.prompts[row, :start]
    ends = jnp.array([data.texts[row, start + step] for step in (3, 7, 11)])
    pads = jnp.array([5, 6, 7])

    def one(eos, pad):
        return lsjax.generate(data.params, prompt, eos_token_id=eos, pad_token_id=pad, **OPTIONS)

    found = jax.vmap(one)(ends, pads)
    for index in range(3):
        alone = lsjax.generate(data.params, prompt, eos_token_id=int(ends[index]), pad_token_id=5 + index, **OPTIONS)
        assert_same(jax.tree.map(lambda x, index=index: x[index], found), alone)
    assert len(set(np.asarray(found.lengths).tolist())) > 1
    assert (found.tokens[:, -1] == pads).all()


@pytest.mark.slow
def test_stacked_params_one_after_the_other(data):
    models = [random_params(CONFIG, seed, deep_from=2, deep_scale=0.3) for seed in (1, 2)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
    prompts = data.prompts[:4]

    def one(params, tokens):
        return lsjax.generate(params, tokens, **OPTIONS)

    expected = [lsjax.generate(model, prompts, **OPTIONS) for model in models]
    expected = jax.tree.map(lambda *x: jnp.stack(x), *expected)
    assert_same(jax.vmap(one, in_axes=(0, None))(stacked, prompts), expected)
    # Only some arrays mapped, the prompts too.
    norms = stacked.tree["norm"]["scale"]

    def with_norm(scale, tokens):
        return one(lsjax.Params(CONFIG, {**models[0].tree, "norm": {"scale": scale}}), tokens)

    found = jax.vmap(with_norm)(norms, jnp.stack([prompts, data.prompts[4:8]]))
    np.testing.assert_array_equal(found.tokens[0], expected.tokens[0])
    np.testing.assert_array_equal(found.tokens[1], with_norm(norms[1], data.prompts[4:8]).tokens)


@pytest.mark.slow
def test_states_round_by_round(data):
    prompts, lengths = data.prompts.reshape(4, 4, WIDTH), data.lengths.reshape(4, 4)
    options = {"exit_layer": 2, "num_speculations": 3, "capacity": 48, "eos_token_id": ()}

    def read(tokens, lengths):
        return lsjax.prefill(data.params, tokens, prompt_lengths=lengths, max_new_tokens=8, **options)

    def write(state):
        for _ in range(2):
            state = lsjax.decode_round(data.params, state)
        return lsjax.prefill(data.params, state.tokens[:, :2], state=state, max_new_tokens=6)

    def visible(state):
        return state.tokens[:, :48], state.lengths, state.limits, state.done, state.stats

    states = jax.vmap(read)(prompts, lengths)
    drafts = jax.vmap(lambda state: lsjax.draft(data.params, state).tokens)(states)
    expected = lsjax.draft(data.params, read(data.prompts, data.lengths)).tokens
    np.testing.assert_array_equal(drafts.reshape(16, 3), expected)
    after = jax.vmap(lambda state: lsjax.decode_round(data.params, write(state)))(states)
    plain = lsjax.decode_round(data.params, write(read(data.prompts, data.lengths)))
    found = jax.tree.map(lambda x: x.reshape(16, *x.shape[2:]), after)
    assert_same(visible(found), visible(plain))


@pytest.mark.slow
def test_a_gradient_passes_by_the_written_text(data):
    prompt = data.prompts[:2, :4]

    def loss(params):
        text = lsjax.generate(params, prompt, **OPTIONS).tokens
        logits = jax.nn.log_softmax(lsjax.forward(params, text))
        return -jnp.take_along_axis(logits[:, :-1], text[:, 1:, None], axis=-1).mean()

    text = lsjax.generate(data.params, prompt, **OPTIONS).tokens

    def fixed(params):
        logits = jax.nn.log_softmax(lsjax.forward(params, text))
        return -jnp.take_along_axis(logits[:, :-1], text[:, 1:, None], axis=-1).mean()

    found, expected = jax.grad(loss)(data.params), jax.grad(fixed)(data.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(found)) > 1e-3


def request(*leading: int) -> Request:
    lengths = np.full(leading, 8, np.int32)
    tokens, eos = np.ones((*leading, 8), np.int32), np.full((*leading, 4), -1, np.int32)
    return Request(tokens, lengths, lengths + 8, eos, np.zeros(leading, np.int32))


def compiled(function, *arguments) -> Any:
    return jax.jit(function).lower(*arguments).compile()


@pytest.mark.parametrize("plan", [Plan(2, 4, 3)])
def test_a_mapped_program_is_the_batch_s_program(data, plan):
    capacity, params = 512, data.params

    def core(request):
        return _generate(params, request, plan, capacity)

    batch = compiled(core, request(8))
    mapped = compiled(jax.vmap(core), request(8, 1))
    slots = capacity + plan.num_speculations + 1
    cache = f"f32[8,{CONFIG.num_key_value_heads},{slots},{CONFIG.head_dim}]"
    for program in (batch, mapped):
        text = program.as_text()
        assert cache in text
        assert not [line for line in text.splitlines() if f"= {cache}" in line and " select(" in line]
        assert len(re.findall(r" while\(", text)) == len(re.findall(r" while\(", batch.as_text()))
    sizes = [temporaries_of(program) for program in (batch, mapped)]
    assert sizes[1] < 1.1 * sizes[0]


@pytest.mark.slow
def test_a_loop_that_selects_is_noticed(data):
    """The negative control of the test above: JAX's own rule for ``while`` under ``vmap``."""

    def plain(request):
        state = start(data.params, request, Plan(4, 4, 0), 512)
        step = functools.partial(run_round, data.params)
        return lax.while_loop(lambda state: state.active, step, state).tokens

    batch, mapped = compiled(plain, request(8)), compiled(jax.vmap(plain), request(8, 1))
    sizes = [temporaries_of(program) for program in (batch, mapped)]
    assert sizes[1] > 1.3 * sizes[0]


def test_rows_without_elements_fold():
    @fold_rows
    def double(params, rows):
        return jax.tree.map(lambda x: params * x, rows)

    rows = (jnp.ones((3, 2, 0)), jnp.arange(6.0).reshape(3, 2))
    found = jax.vmap(double, in_axes=(None, 0))(2.0, rows)
    assert found[0].shape == (3, 2, 0)
    np.testing.assert_array_equal(found[1], 2 * rows[1])
    found = jax.vmap(double, in_axes=(None, (0, None)))(2.0, (rows[0], rows[1][0]))
    np.testing.assert_array_equal(found[1], jnp.stack([2 * rows[1][0]] * 3))
