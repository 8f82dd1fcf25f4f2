"""The decode state driven from the host: continuing at an offset, shared prefixes, capacity, frozen rows."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import NEW, WIDTH, Report, case

import lsjax

pytestmark = pytest.mark.usefixtures("fewer_optimizations")

OPTIONS: Any = {"exit_layer": 2, "num_speculations": 3, "eos_token_id": ()}


@pytest.fixture(scope="module")
def data():
    return case(1, 0.1)


def finish(params, state):
    """Rounds until every row is done; each adds 1 to K + 1 tokens to the rows that are not."""
    while bool(state.active):
        before, active = np.asarray(state.lengths), ~np.asarray(state.done)
        state = lsjax.decode_round(params, state)
        added = np.asarray(state.lengths) - before
        assert ((added >= 1) & (added <= 4))[active].all()
        assert (added == 0)[~active].all()
    return state


def same_prompt(data, width: int = WIDTH):
    """Rows whose prompt is as wide as can be, from the oracle's own texts."""
    return data.texts[:6, :width]


def report_of(data, rows, state, limit: int) -> Report:
    report = Report()
    tokens = np.asarray(state.tokens)[:, : WIDTH + limit]
    report.compare(data, rows, tokens, state.lengths, limit)
    return report


def test_rounds_from_the_host_equal_generate(data):
    rows = np.arange(6)
    prompt = {"prompt_lengths": data.lengths[rows], "max_new_tokens": NEW, **OPTIONS}
    state = finish(data.params, lsjax.prefill(data.params, data.prompts[rows], **prompt))
    assert state.capacity >= WIDTH + NEW
    out = lsjax.generate(data.params, data.prompts[rows], **prompt)
    np.testing.assert_array_equal(np.asarray(state.tokens)[:, : WIDTH + NEW], out.tokens)
    np.testing.assert_array_equal(state.lengths, out.lengths)
    jax.tree.map(np.testing.assert_array_equal, state.stats, out.stats)
    assert not report_of(data, rows, state, NEW).wrong


@pytest.mark.parametrize("cut", [1, 5])
def test_continuing_at_an_offset_equals_one_long_prompt(data, cut):
    """Ragged heads, ragged tails; rows of the whole prompt as the oracle read it."""
    rows = np.arange(8)
    lengths = data.lengths[rows]
    heads = np.minimum(lengths, cut + rows % 3)
    tails = lengths - heads
    rest = np.zeros((8, WIDTH), int)
    for row in rows:
        rest[row, : tails[row]] = data.prompts[row, heads[row] : lengths[row]]
    head = lsjax.prefill(
        data.params,
        data.prompts[rows][:, : heads.max()],
        prompt_lengths=heads,
        capacity=64,
        max_new_tokens=NEW,
        **OPTIONS,
    )
    state = lsjax.prefill(data.params, rest, prompt_lengths=tails, state=head, max_new_tokens=NEW)
    np.testing.assert_array_equal(state.lengths, lengths)
    assert not report_of(data, rows, finish(data.params, state), NEW).wrong


def test_a_conversation_continues_its_own_text(data):
    """Generate, say more, generate: the second answer is what the whole text so far gives as one prompt."""
    prompt = data.texts[:4, :WIDTH]
    state = lsjax.prefill(data.params, prompt, capacity=80, max_new_tokens=9, **OPTIONS)
    state = finish(data.params, state)
    said = data.texts[4:8, :5]
    whole = np.concatenate([np.asarray(state.tokens)[:, : WIDTH + 9], said], axis=1)
    state = finish(data.params, lsjax.prefill(data.params, said, state=state, max_new_tokens=20))
    expected = lsjax.generate(data.params, whole, max_new_tokens=20, eos_token_id=())
    np.testing.assert_array_equal(np.asarray(state.tokens)[:, : whole.shape[1] + 20], expected.tokens)
    assert (np.asarray(state.stats.new_tokens) == 29).all()


def test_a_prefix_is_shared_by_many_continuations(data):
    prefix = lsjax.prefill(data.params, data.texts[:2, :6], capacity=64, **OPTIONS)
    tails = [data.texts[2:4, :4], data.texts[4:6, :7]]
    states = [finish(data.params, lsjax.prefill(data.params, tail, state=prefix, max_new_tokens=15)) for tail in tails]
    states.append(finish(data.params, lsjax.prefill(data.params, tails[0], state=prefix, max_new_tokens=15)))
    for tail, state in zip([*tails, tails[0]], states, strict=True):
        whole = np.concatenate([data.texts[:2, :6], tail], axis=1)
        expected = lsjax.generate(data.params, whole, max_new_tokens=15, eos_token_id=())
        np.testing.assert_array_equal(np.asarray(state.tokens)[:, : whole.shape[1] + 15], expected.tokens)


def test_rows_with_nothing_more_to_say_stay_as_they_are(data):
    rows = np.arange(6)
    state = lsjax.prefill(
        data.params, data.prompts[rows], prompt_lengths=data.lengths[rows], max_new_tokens=8, capacity=64, **OPTIONS
    )
    state = finish(data.params, state)
    before = np.asarray(state.tokens)
    more = lsjax.prefill(data.params, data.texts[:6, :3], prompt_lengths=np.array([0, 3, 0, 3, 3, 3]), state=state)
    np.testing.assert_array_equal(more.done, [True, False, True, False, False, False])
    after = lsjax.decode_round(data.params, more)
    np.testing.assert_array_equal(np.asarray(after.tokens)[[0, 2]], before[[0, 2]])


def test_a_row_ends_exactly_at_the_capacity(data):
    """Without max_new_tokens rows run to the capacity, and the last round writes nothing over the past."""
    rows = np.arange(6)
    prompts = data.prompts[rows], data.lengths[rows]
    capacity = WIDTH + 9
    state = lsjax.prefill(data.params, prompts[0], prompt_lengths=prompts[1], capacity=capacity, **OPTIONS)
    state = finish(data.params, state)
    assert (np.asarray(state.lengths) == capacity).all()
    for row in rows:
        np.testing.assert_array_equal(np.asarray(state.tokens)[row, :capacity], data.texts[row, :capacity])
    cached = [np.asarray(layer.key) for layer in state.cache]
    again = lsjax.decode_round(data.params, state)
    np.testing.assert_array_equal(again.tokens, state.tokens)
    assert again.stats.rounds.tolist() == state.stats.rounds.tolist()
    for layer, old in zip(again.cache, cached, strict=True):
        np.testing.assert_allclose(np.asarray(layer.key)[:, :, : capacity - 1], old[:, :, : capacity - 1], atol=1e-5)


def test_continuing_up_to_the_capacity_moves_nothing(data):
    """Rows of different lengths, the padded columns of the longest past the cache's end."""
    rows = np.array([0, 1])
    long, short = data.texts[0, :40], data.texts[1, :3]
    prompts = np.zeros((2, 40), int)
    prompts[0], prompts[1, :3] = long, short
    state = lsjax.prefill(data.params, prompts, prompt_lengths=np.array([40, 3]), capacity=50, **OPTIONS)
    more = np.zeros((2, 30), int)
    more[0, :2], more[1] = data.texts[2, :2], data.texts[3, :30]
    state = lsjax.prefill(data.params, more, prompt_lengths=np.array([2, 30]), state=state, max_new_tokens=8)
    state = finish(data.params, state)
    for row, whole in zip(rows, (np.append(long, more[0, :2]), np.append(short, more[1])), strict=True):
        expected = lsjax.generate(data.params, whole, max_new_tokens=8, eos_token_id=())
        np.testing.assert_array_equal(np.asarray(state.tokens)[row, : len(whole) + 8], expected.tokens)


@pytest.mark.parametrize("options", [{}, {"exit_layer": 2, "num_speculations": 3}])
def test_garbage_in_unused_slots_changes_nothing(data, options):
    rows = np.arange(6)
    state = lsjax.prefill(
        data.params,
        data.prompts[rows],
        prompt_lengths=data.lengths[rows],
        max_new_tokens=NEW,
        capacity=700,
        eos_token_id=(),
        **options,
    )
    valid = data.lengths[rows] - 1
    slots = state.cache[0].key.shape[2]
    used = (np.arange(slots) < valid[:, None])[:, None, :, None]
    filled = jax.tree.map(lambda leaf: jnp.where(used, leaf, 1e4), state.cache)
    assert not report_of(data, rows, finish(data.params, state.replace(cache=filled)), NEW).wrong


def test_padding_on_the_left_on_the_right_and_lengths_mean_the_same(data):
    rows = np.arange(6)
    lengths = data.lengths[rows]
    options = {"max_new_tokens": 12, **OPTIONS}
    expected = lsjax.generate(data.params, data.prompts[rows], prompt_lengths=lengths, **options)
    mask = np.arange(WIDTH) < lengths[:, None]
    right = lsjax.generate(data.params, np.where(mask, data.prompts[rows], -100), attention_mask=mask, **options)
    shifted = np.full((6, WIDTH), 999)
    for row in rows:
        shifted[row, WIDTH - lengths[row] :] = data.prompts[row, : lengths[row]]
    left_mask = mask[:, ::-1].astype(int)
    left = lsjax.generate(data.params, shifted, attention_mask=left_mask, **options)
    inside = jax.jit(lambda p, t, m: lsjax.generate(p, t, attention_mask=m, **options))
    traced = inside(data.params, jnp.asarray(shifted), jnp.asarray(left_mask))
    for other in (right, left, traced):
        jax.tree.map(np.testing.assert_array_equal, other, expected)


def test_works_inside_the_callers_jit_and_with_traced_lengths(data):
    rows = np.arange(6)
    options = {"max_new_tokens": 12, **OPTIONS}
    expected = lsjax.generate(data.params, data.prompts[rows], prompt_lengths=data.lengths[rows], **options)

    @jax.jit
    def mine(params, tokens, lengths):
        out = lsjax.generate(params, tokens, prompt_lengths=lengths, **options)
        return out, out.stats.acceptance_rate.mean()

    out, rate = mine(data.params, jnp.asarray(data.prompts[rows]), jnp.asarray(data.lengths[rows]))
    jax.tree.map(np.testing.assert_array_equal, out, expected)
    np.testing.assert_allclose(rate, np.mean(np.asarray(expected.stats.acceptance_rate)), rtol=1e-6)
    closed = jax.jit(
        lambda: lsjax.generate(data.params, data.prompts[rows], prompt_lengths=data.lengths[rows], **options)
    )
    jax.tree.map(np.testing.assert_array_equal, closed(), expected)


def test_prefill_and_rounds_work_inside_jit(data):
    rows = np.arange(6)

    @functools.partial(jax.jit, static_argnames="cut")
    def mine(params, tokens, lengths, cut):
        state = lsjax.prefill(params, tokens[:, :cut], prompt_lengths=lengths, capacity=64, **OPTIONS)
        state = lsjax.prefill(params, tokens[:, cut:], state=state, max_new_tokens=12)
        return jax.lax.while_loop(lambda s: s.active, lambda s: lsjax.decode_round(params, s), state).tokens

    prompt = data.texts[rows, :WIDTH]
    expected = lsjax.generate(data.params, prompt, max_new_tokens=12, eos_token_id=())
    found = mine(data.params, jnp.asarray(prompt), jnp.full(6, 7), cut=7)
    np.testing.assert_array_equal(found[:, : WIDTH + 12], expected.tokens)


def test_one_dimension_in_one_dimension_out(data):
    length = int(data.lengths[0])
    out = lsjax.generate(data.params, jnp.asarray(data.prompts[0, :length]), max_new_tokens=5, **OPTIONS)
    assert out.tokens.shape == (length + 5,)
    assert out.lengths.shape == out.stats.rounds.shape == ()
    assert out.stats.accept_histogram.shape == (4,)
    assert isinstance(out.tokens, jax.Array)


def test_statistics_are_zero_where_nothing_was_drafted(data):
    out = lsjax.generate(data.params, data.prompts[:2], max_new_tokens=5, eos_token_id=())
    np.testing.assert_array_equal(out.stats.acceptance_rate, [0, 0])
    np.testing.assert_array_equal(out.stats.tokens_per_round, [1, 1])
    assert out.stats.accept_histogram.tolist() == [[5], [5]]


def test_statistics_leave_out_drafts_beyond_an_eos(data):
    """An EOS at every offset of a block: what was drafted and kept, worked out from the oracle's text."""
    row = 0
    length = int(data.lengths[row])
    text = data.texts[row, length:]
    prompt = data.prompts[row, :length]
    accept_all: Any = {"exit_layer": 4, "num_speculations": 3, "max_new_tokens": NEW}
    for offset in range(8):
        eos = int(text[offset])
        end = int(np.argmax(text == eos))  # its first appearance
        out = lsjax.generate(data.params, prompt, eos_token_id=eos, **accept_all)
        assert int(out.lengths) == length + end + 1
        # Blocks of three drafts and a bonus: the EOS in slot 3 is the bonus, else a draft of its own.
        full, slot = divmod(end, 4)
        assert int(out.stats.rounds) == full + 1
        assert int(out.stats.drafted) == int(out.stats.accepted) == 3 * full + min(slot + 1, 3)


def test_rows_without_more_tokens_keep_their_limits(data):
    state = lsjax.prefill(data.params, data.texts[:2, :8], capacity=20, max_new_tokens=4, **OPTIONS)
    for new in (None, 2):
        more = lsjax.prefill(data.params, data.texts[:2, :1], prompt_lengths=[0, 1], state=state, max_new_tokens=new)
        assert more.limits.tolist() == [12, 20 if new is None else 11]
    # A row that is full takes no part, so it forbids the others nothing.
    full = finish(data.params, lsjax.prefill(data.params, data.texts[:2, :8], capacity=12, **OPTIONS))
    state = full.replace(lengths=full.lengths - jnp.array([0, 3]), done=jnp.array([True, False]))
    more = lsjax.prefill(data.params, data.texts[:2, :1], prompt_lengths=[0, 1], state=state)
    assert more.done.tolist() == [True, False]
    with pytest.raises(ValueError, match="capacity: expected at least 14 tokens"):
        lsjax.prefill(data.params, data.texts[:2, :1], state=full)


def test_continuing_past_the_capacity_in_jit_leaves_out_what_does_not_fit(data):
    """Values cannot be checked there; nothing old is overwritten, and no row grows past the capacity."""
    state = lsjax.prefill(data.params, data.texts[:2, :10], capacity=16, **OPTIONS)
    more = jax.jit(lambda s, t: lsjax.prefill(data.params, t, state=s, max_new_tokens=5))(state, data.texts[2:4, :12])
    assert more.lengths.tolist() == more.limits.tolist() == [16, 16]
    assert more.done.all()
    np.testing.assert_array_equal(np.asarray(more.tokens)[:, :10], data.texts[:2, :10])
    np.testing.assert_array_equal(np.asarray(more.tokens)[:, 10:16], data.texts[2:4, :6])
    assert (np.asarray(more.tokens)[:, 16:] == 0).all()


def test_padding_is_the_pad_id_everywhere(data):
    options: Any = {"max_new_tokens": 20, "pad_token_id": 7, "prompt_lengths": np.array([2, 3]), **OPTIONS}
    eager = lsjax.generate(data.params, data.texts[:2, :12], capacity=23, **options)
    traced = jax.jit(lambda t: lsjax.generate(data.params, t, capacity=23, **options))(data.texts[:2, :12])
    state = lsjax.prefill(data.params, data.texts[:2, :12], capacity=23, **options)
    np.testing.assert_array_equal(eager.tokens, traced.tokens)
    for row, length in enumerate((2, 3)):
        assert (eager.tokens[row, length + 20 :] == 7).all()
        assert (state.tokens[row, length:] == 7).all()


def test_special_ids_may_be_traced(data):
    eos = int(data.texts[0, data.lengths[0] + 5])
    prompt = data.prompts[0, : data.lengths[0]]
    options: Any = {"exit_layer": 2, "num_speculations": 3, "max_new_tokens": NEW}
    expected = lsjax.generate(data.params, prompt, eos_token_id=eos, pad_token_id=9, **options)
    mine = jax.jit(lambda eos, pad: lsjax.generate(data.params, prompt, eos_token_id=eos, pad_token_id=pad, **options))
    for traced in (mine(eos, 9), mine(jnp.array([eos, 250]), 9)):
        np.testing.assert_array_equal(traced.tokens, expected.tokens)
    forms: list[Any] = [np.array(eos), jnp.int32(eos), [eos], {eos}]
    for form in forms:
        again = lsjax.generate(data.params, prompt, eos_token_id=form, **options | {"pad_token_id": np.int64(9)})
        np.testing.assert_array_equal(again.tokens, expected.tokens)


def test_the_same_tokens_under_x64(data):
    rows = np.arange(6)
    prompt = {"prompt_lengths": data.lengths[rows], "max_new_tokens": NEW, "capacity": 64, **OPTIONS}
    with jax.enable_x64(True):
        state = finish(data.params, lsjax.prefill(data.params, data.prompts[rows], **prompt))
        out = lsjax.generate(data.params, data.prompts[rows], **prompt)
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), data.params)
        double = lsjax.generate(wide, data.prompts[rows], **prompt)
        assert wide.dtype == jnp.float64
    assert not report_of(data, rows, state, NEW).wrong
    for found in (out, double):
        np.testing.assert_array_equal(found.tokens, np.asarray(state.tokens)[:, : WIDTH + NEW])
        assert found.tokens.dtype == found.stats.accepted.dtype == jnp.int32


def test_strict_dtype_promotion_and_leak_checks(data):
    with jax.numpy_dtype_promotion("strict"), jax.checking_leaks():
        out = lsjax.generate(data.params, data.prompts[:2], max_new_tokens=3, **OPTIONS)
    assert out.lengths.tolist() == [WIDTH + 3] * 2
