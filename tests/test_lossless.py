"""Speculation is invisible: whatever the options, the tokens are those of plain full forwards and argmax."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import NEW, WIDTH, Report, case
from support import compiled_programs

import lsjax
from lsjax.decode import generate as generate_module
from lsjax.decode.round import commit, run_round
from lsjax.model import projection

pytestmark = pytest.mark.usefixtures("fewer_optimizations")
MODELS = [(4, 0.15), (5, 0.1), (7, 0.12)]
PAD = 7


def eos_choice(rng, texts: np.ndarray, lengths: np.ndarray) -> tuple[int, ...]:
    """Nothing, or up to five ids of which the first stands somewhere in a row's new tokens."""
    if rng.random() < 0.3:
        return ()
    row = rng.integers(len(lengths))
    hit = int(texts[row, lengths[row] + rng.integers(NEW)])
    return (hit, *rng.integers(0, 251, rng.integers(0, 5)).tolist())


@pytest.fixture(scope="module", autouse=True)
def every_form_of_a_product():
    """Small models take the form that CPUs run fastest for large ones, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(projection, "_WIDE", 40)  # between the hidden size and the MLP's
        yield


def form(data, exit_layer: int | None, num_speculations: int | None) -> lsjax.Params | lsjax.DecodeParams:
    """Plain weights for one half of the programs, prepared ones for the other."""
    return data.prepared if ((exit_layer or 0) + (num_speculations or 0)) % 2 else data.params


def run(program, batches: int, batch: int, seed: int, report: Report, histograms: dict) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(batches):
        data = case(*MODELS[rng.integers(len(MODELS))])
        rows = rng.choice(16, batch, replace=False)
        limit = int(rng.integers(1, NEW + 1)) if rng.random() < 0.6 else NEW
        eos = eos_choice(rng, data.texts[rows], data.lengths[rows])
        out = lsjax.generate(
            form(data, program.get("exit_layer"), program.get("num_speculations")),
            data.prompts[rows],
            prompt_lengths=data.lengths[rows],
            max_new_tokens=limit,
            eos_token_id=eos,
            pad_token_id=PAD,
            capacity=64,
            **program,
        )
        report.compare(data, rows, out.tokens, out.lengths, limit, eos, PAD)
        stats = out.stats
        assert (np.asarray(out.lengths) - data.lengths[rows] == stats.new_tokens).all()
        assert (stats.accept_histogram.sum(axis=1) == stats.rounds).all()
        assert (stats.accept_histogram @ np.arange(stats.accept_histogram.shape[1]) == stats.accepted).all()
        assert (stats.accepted <= stats.drafted).all()
        exit_layer, drafts = program.get("exit_layer"), program.get("num_speculations")
        if drafts and exit_layer < 4:
            histograms[drafts] = histograms.get(drafts, 0) + np.asarray(stats.accept_histogram).sum(axis=0)
        if exit_layer == 4:
            assert (stats.accepted == stats.drafted).all()


def test_lossless_over_exits_drafts_batches_limits_and_eos():
    programs = [
        ({"exit_layer": exit_layer, "num_speculations": drafts}, batch, batches)
        for exit_layer in (1, 2, 3, 4)
        for drafts in (0, 1, 2, 3, 4, 6)
        for batch, batches in (((8, 10), (1, 8)) if drafts == 4 else ((8, 10),))
    ]
    programs += [({}, 8, 10), ({}, 1, 8)]
    compiled = compiled_programs(generate_module._generate)
    report, histograms = Report(), {}
    for seed, (program, batch, batches) in enumerate(programs):
        run(program, batches, batch, seed, report, histograms)
    assert not report.wrong, report.wrong[0]
    assert report.cases >= 2000
    assert compiled_programs(generate_module._generate) - compiled >= 30
    assert report.ties <= 0.01 * report.cases
    for drafts, histogram in histograms.items():
        share = histogram / histogram.sum()
        assert len(share) == drafts + 1
        assert (share >= 0.05).all(), (drafts, share.round(3))


def test_early_exit_writes_what_a_model_without_the_later_layers_writes():
    shallow, report = case(0, 0.3, 2), Report()
    rows = np.arange(8)
    out = lsjax.generate(
        shallow.params,
        shallow.prompts[rows],
        prompt_lengths=shallow.lengths[rows],
        exit_layer=2,
        strategy="early_exit",
        max_new_tokens=NEW,
        eos_token_id=(),
    )
    report.compare(shallow, rows, out.tokens, out.lengths, NEW)
    assert not report.wrong
    deep = case(0, 0.3)
    assert (deep.prompts != shallow.prompts).any() or (deep.texts != shallow.texts).any()


@pytest.mark.parametrize("program", [{}, {"exit_layer": 2, "num_speculations": 4}])
def test_a_row_alone_in_a_batch_and_permuted(program):
    data = case(1, 0.1)
    options = {"max_new_tokens": NEW, "eos_token_id": (int(data.texts[0, data.lengths[0] + 20]),), **program}
    rows = np.arange(8)
    together = lsjax.generate(data.params, data.prompts[rows], prompt_lengths=data.lengths[rows], **options)
    order = np.random.default_rng(0).permutation(8)
    permuted = lsjax.generate(data.params, data.prompts[order], prompt_lengths=data.lengths[order], **options)
    np.testing.assert_array_equal(permuted.tokens, together.tokens[order])
    np.testing.assert_array_equal(permuted.stats.accept_histogram, together.stats.accept_histogram[order])
    for row in (0, 3):
        length = int(data.lengths[row])
        alone = lsjax.generate(data.params, data.prompts[row, :length], **options)
        assert alone.tokens.shape == (length + NEW,)
        np.testing.assert_array_equal(alone.tokens, together.tokens[row, : length + NEW])
        assert alone.lengths == together.lengths[row]
        np.testing.assert_array_equal(alone.stats.accept_histogram, together.stats.accept_histogram[row])


# Deliberate faults. Each is a wrong round, driven like the right one and judged by the same report.


def rewound_one_too_far(params, state):
    """The next round's keys and values land one slot too early, over a valid one."""
    drafted = lsjax.draft(params, state)
    after = commit(state, drafted, lsjax.verify(params, state, drafted))
    shifted = jax.tree.map(lambda leaf: jnp.roll(leaf, 1, axis=2), after.cache)
    return after.replace(cache=shifted)


def hole_after_full_acceptance(params, state):
    """The last draft's early keys and values are never written."""
    drafted = lsjax.draft(params, state)
    slot = state.lengths - 1 + drafted.tokens.shape[1]
    cache = jax.tree.map(
        lambda new, old: jax.vmap(lambda n, o, s: n.at[:, s].set(o[:, s]))(new, old, slot),
        drafted.cache,
        state.cache[: drafted.exit_layer],
    )
    drafted = drafted.replace(cache=cache)
    return commit(state, drafted, lsjax.verify(params, state, drafted))


def stale_exit_hidden_state(params, state):
    """Verification of the last position reads the hidden state of the position before."""
    drafted = lsjax.draft(params, state)
    hidden = drafted.hidden.at[:, -1].set(drafted.hidden[:, -2])
    drafted = drafted.replace(hidden=hidden)
    return commit(state, drafted, lsjax.verify(params, state, drafted))


def drive(round_function, params, data, rows) -> Report:
    state = lsjax.prefill(
        params,
        data.prompts[rows],
        prompt_lengths=data.lengths[rows],
        exit_layer=2,
        num_speculations=3,
        max_new_tokens=NEW,
        eos_token_id=(),
        capacity=64,
    )
    step = jax.jit(functools.partial(round_function, params))
    rounds = 0
    while bool(state.active):
        state, rounds = step(state), rounds + 1
        assert rounds <= NEW
    report = Report()
    report.compare(data, rows, np.asarray(state.tokens)[:, : WIDTH + NEW], state.lengths, NEW)
    return report


def test_the_right_round_passes_where_each_deliberate_fault_is_caught():
    data, rows = case(1, 0.1), np.arange(8)
    assert not drive(run_round, data.params, data, rows).wrong
    assert not drive(run_round, data.prepared, data, rows).wrong
    for fault in (rewound_one_too_far, hole_after_full_acceptance, stale_exit_hidden_state):
        assert drive(fault, data.params, data, rows).wrong, fault.__name__


def test_acceptance_follows_from_each_layer_s_agreement_with_the_text_alone():
    """Every count of every row, without running a round: the same compiled programs as above, other prompts."""
    from lsjax.measure import agreement

    rng, ends, kept = np.random.default_rng(0), 0, np.zeros(7, int)
    for index in range(6):
        data = case(*MODELS[index % len(MODELS)])
        rows = rng.choice(16, 8, replace=False)
        limit = NEW if index < 3 else int(rng.integers(8, NEW))
        options = {
            "prompt_lengths": data.lengths[rows],
            "max_new_tokens": limit,
            "eos_token_id": eos_choice(rng, data.texts[rows], data.lengths[rows])[:4] if index else (),
        }
        found = agreement(data.params, data.prompts[rows], **options)
        assert found.parted == 0
        assert found.rate[-1] == 1
        ends += int(found.ended.sum())
        for drafts in (1, 2, 4, 6):
            stats = dataclasses.replace(found, num_speculations=drafts).stats
            for exit_layer in (1, 2, 3, 4):
                out = lsjax.generate(
                    form(data, exit_layer, drafts),
                    data.prompts[rows],
                    exit_layer=exit_layer,
                    num_speculations=drafts,
                    capacity=64,
                    **options,
                )
                for name, measured in vars(out.stats).items():
                    np.testing.assert_array_equal(getattr(stats, name)[exit_layer - 1], measured, err_msg=name)
            kept[: drafts + 1] += stats.accept_histogram[:3].sum(axis=(0, 1))
    assert ends >= 5
    assert (kept > 20).all(), kept
