"""Rounds from the host, block by block, and states taken back to fewer tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import CONFIG
from support import counted_compilations, random_params

import lsjax
from lsjax.decode import stream as module
from lsjax.text.prompts import pad_rows

pytestmark = pytest.mark.usefixtures("fewer_optimizations")

BATCH, WIDTH, NEW, CAPACITY = 6, 12, 30, 64
STRATEGIES: list[dict[str, Any]] = [
    {"exit_layer": 1, "num_speculations": 3},
    {"exit_layer": 1, "strategy": "early_exit"},
    {},
]
SPECULATIVE = {"capacity": CAPACITY, "eos_token_id": (), **STRATEGIES[0]}


class Data(NamedTuple):
    """A model of two layers, of which the first often names the second's token; full-width prompts, ragged lengths."""

    params: lsjax.Params
    prompts: np.ndarray
    lengths: np.ndarray

    def written(self, texts: list[list[int]], new: int) -> list[list[int]]:
        """What plain decoding writes after these texts; one program for all."""
        rows, lengths = pad_rows([*texts, *[[1]] * (BATCH - len(texts)), [0] * 32])
        options: dict[str, Any] = {"capacity": CAPACITY, "max_new_tokens": NEW, "eos_token_id": ()}
        out = lsjax.generate(self.params, rows, prompt_lengths=lengths, **options)
        return [row[:new] for row in new_tokens(out, lengths)[: len(texts)]]


@pytest.fixture(scope="module")
def data():
    params = random_params(dataclasses.replace(CONFIG, num_hidden_layers=2), 5, deep_from=1, deep_scale=0.4)
    prompts = np.random.default_rng(5).integers(0, CONFIG.vocab_size, (BATCH, WIDTH))
    return Data(params, prompts, np.array([3, 12, 7, 1, 9, 5]))


def joined(blocks) -> list[list[int]]:
    """Each row's new tokens of all blocks."""
    blocks = list(blocks)
    return [[token for block in blocks for token in block.row(row).tolist()] for row in range(len(blocks[0].counts))]


def new_tokens(out, lengths) -> list[list[int]]:
    spans = zip(np.asarray(out.tokens), lengths, np.asarray(out.lengths), strict=True)
    return [row[start:end].tolist() for row, start, end in spans]


def test_the_model_keeps_some_drafts_and_writes_different_texts(data):
    found = data.written(data.prompts.tolist(), NEW)
    assert all(len(set(row)) > 8 for row in found)
    assert len({tuple(row) for row in found}) == BATCH


@pytest.fixture(scope="module")
def eos(data):
    """Ids that end some rows early."""
    texts = data.written([row[:length].tolist() for row, length in zip(data.prompts, data.lengths, strict=True)], NEW)
    return texts[0][9], texts[1][14]


DRAWING = {"temperature": 0.8, "top_k": 40}


@pytest.mark.parametrize(
    ("strategy", "drawing"),
    [
        (STRATEGIES[0], {}),
        (STRATEGIES[0], DRAWING),
        pytest.param(STRATEGIES[1], {}, marks=pytest.mark.slow),
        (STRATEGIES[1], DRAWING),
        (STRATEGIES[2], {}),
        pytest.param(STRATEGIES[2], DRAWING, marks=pytest.mark.slow),
    ],
)
def test_the_blocks_are_what_generate_writes(data, eos, strategy, drawing):
    options = {"prompt_lengths": data.lengths, "max_new_tokens": NEW, "eos_token_id": eos, "capacity": CAPACITY}
    options |= strategy | drawing | ({"key": jax.random.key(3)} if drawing else {})
    out = lsjax.generate(data.params, data.prompts, **options)
    stream = lsjax.stream(data.params, data.prompts, **options)
    blocks = list(stream)
    expected = new_tokens(out, data.lengths)
    assert joined(blocks) == expected
    assert drawing or strategy.get("strategy") or len({len(row) for row in expected}) > 1
    assert blocks[-1].done.all()
    assert not any(block.done.all() for block in blocks[:-1])
    jax.tree.map(np.testing.assert_array_equal, blocks[-1].stats, out.stats)
    np.testing.assert_array_equal(stream.state.lengths, out.lengths)
    width = strategy.get("num_speculations", 0) + 1
    for block in blocks:
        slot = np.arange(width)
        assert block.tokens.shape == block.drafted.shape == (BATCH, width)
        np.testing.assert_array_equal(block.tokens == -1, slot >= block.counts[:, None])
        assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(block))
        assert (block.tokens.dtype, block.counts.dtype, block.drafted.dtype) == (np.int32, np.int32, bool)
    assert any(block.drafted.any() for block in blocks) == (width > 1)


def test_drafted_tokens_are_the_ones_that_the_early_layers_name(data):
    """By full forwards: a draft is what the exit says, the token after the kept ones is the last layer's alone."""
    blocks = list(lsjax.stream(data.params, data.prompts, max_new_tokens=NEW, **SPECULATIVE))
    text = np.concatenate([data.prompts, np.array(joined(blocks))], axis=1)
    early = np.argmax(lsjax.forward(data.params, text, num_layers=1), axis=-1)[:, WIDTH - 1 : -1]
    drafted, corrections = 0, 0
    for row in range(BATCH):
        at = 0
        for block in blocks:
            new, kept = block.row(row).tolist(), int(block.drafted[row].sum())
            assert block.drafted[row, :kept].all()
            assert len(new) - kept == (1 if new else 0)
            assert new[:kept] == early[row, at : at + kept].tolist()
            if new and kept < min(3, NEW - at - 1):  # a draft was rejected
                assert new[kept] != early[row, at + kept]
                corrections += 1
            drafted += kept
            at += len(new)
    assert min(drafted, corrections) > 5


def test_an_eos_among_the_drafts_is_a_draft(data):
    """The last layer drafts for itself, so all drafts are kept; an EOS at each place of a block."""
    (text,) = data.written([data.prompts[0].tolist()], NEW)
    options: dict[str, Any] = {"exit_layer": 2, "num_speculations": 3, "max_new_tokens": NEW}
    for offset in range(8):
        end = text.index(text[offset])
        blocks = list(lsjax.stream(data.params, data.prompts[0], eos_token_id=text[offset], **options))
        assert joined(blocks) == [text[: end + 1]]
        drafted = [flag for block in blocks for flag in block.drafted[0, : block.counts[0]].tolist()]
        assert drafted == [i % 4 < 3 for i in range(end + 1)]


def test_nothing_compiles_after_the_first_block_and_the_cache_is_not_copied(data):
    stream = lsjax.stream(data.params, data.prompts, max_new_tokens=NEW, **SPECULATIVE)
    cache = stream.state.cache
    next(stream)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(cache))
    count = 0
    with counted_compilations() as compiled:
        for count, _ in enumerate(stream):
            if count == 2:
                stream.stop([1, 3])
    assert count > 3
    assert compiled == []
    state = lsjax.prefill(data.params, data.prompts, max_new_tokens=NEW, **SPECULATIVE)
    lowered = module._next_block.lower(data.params, state.replace(cache=()), state.cache, np.zeros(BATCH, bool))
    memory: Any = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))


def test_one_transfer_a_round(data, monkeypatch):
    stream = lsjax.stream(data.params, data.prompts, max_new_tokens=NEW, **SPECULATIVE)
    fetched: list[Any] = []
    right = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: fetched.append(tree) or right(tree))
    for number, _ in enumerate(stream, start=1):
        assert len(fetched) == number
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(fetched[0])) < 1000


def test_rows_can_be_ended_from_outside(data):
    """They get no more tokens and count no more; the others write what they would have written."""
    options: dict[str, Any] = {"max_new_tokens": NEW, **SPECULATIVE}
    plain = list(lsjax.stream(data.params, data.prompts, **options))
    stream = lsjax.stream(data.params, data.prompts, **options)
    blocks = [next(stream), next(stream)]
    stream.stop(np.array([0, 2]))
    assert stream.done.tolist() == stream.state.done.tolist() == [True, False, True, False, False, False]
    rounds = blocks[-1].stats.rounds
    blocks += stream
    found, expected, before = joined(blocks), joined(plain), joined(plain[:2])
    for row in range(BATCH):
        assert found[row] == (before if row in (0, 2) else expected)[row]
    assert blocks[-1].stats.rounds[[0, 2]].tolist() == rounds[[0, 2]].tolist() == [2, 2]
    stream = lsjax.stream(data.params, data.prompts, **options)
    next(stream)
    for row in range(BATCH):
        stream.stop(row)
    assert list(stream) == []
    assert stream.state.done.all()


def test_a_stream_continues_a_state_and_hands_it_on(data):
    """Prompt, answer, more, answer: the second answer is what the whole text gives as one prompt."""
    stream = lsjax.stream(data.params, data.prompts, max_new_tokens=9, **SPECULATIVE)
    first = joined(stream)
    said = data.prompts[::-1, :5]
    more = lsjax.stream(data.params, said, state=stream.state, max_new_tokens=20)
    second = joined(more)
    whole = np.concatenate([data.prompts, np.array(first), said], axis=1)
    assert second == data.written(whole.tolist(), 20)
    assert more.state.stats.new_tokens.tolist() == [29] * BATCH


@pytest.mark.slow
def test_streams_on_two_devices(data, eos):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",))
    rows, everywhere = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (("rows",), ()))
    options = {"prompt_lengths": data.lengths, "max_new_tokens": NEW, **SPECULATIVE, "eos_token_id": eos}
    expected = joined(lsjax.stream(data.params, data.prompts, **options))
    params, prompts = jax.device_put(data.params, everywhere), jax.device_put(data.prompts, rows)
    stream = lsjax.stream(params, prompts, **options)
    blocks = [next(stream), next(stream)]
    cache = stream.state.cache[0].key
    assert cache.sharding.shard_shape(cache.shape)[0] == BATCH // 2
    with counted_compilations() as compiled:
        blocks += stream
    assert compiled == []
    assert joined(blocks) == expected


def test_misuse_is_one_clear_error(data):
    prompt = data.prompts[0]
    with pytest.raises(TypeError, match=r"stream: expected concrete arrays, .* inside jit or vmap use lsjax\.generate"):
        jax.jit(lambda params: [block.counts for block in lsjax.stream(params, prompt)])(data.params)
    with pytest.raises(TypeError, match="stream: expected concrete arrays"):
        jax.jit(lambda: [block.counts for block in lsjax.stream(data.params, prompt)])()
    with pytest.raises(ValueError, match=r"exit_layer: expected a layer in 1\.\.2, got 9"):
        lsjax.stream(data.params, prompt, exit_layer=9)
    stream = lsjax.stream(data.params, prompt, max_new_tokens=8)
    for rows, message in [(1, r"expected an int in 0\.\.0, got 1"), ([0, -1], "got -1"), (True, "got True")]:
        with pytest.raises(ValueError, match=f"rows: .*{message}"):
            stream.stop(rows)
    assert not stream.done.any()
    lsjax.decode_round(data.params, stream.state)
    with pytest.raises(ValueError, match="its cache went into decode_round"):
        next(stream)
    with pytest.raises(TypeError, match="state: expected a DecodeState"):
        lsjax.Stream(data.params, prompt)  # pyright: ignore[reportArgumentType]


def test_what_decoding_offers_reaches_the_blocks(data):
    """Stop sequences, processors, scores and the drafting options, as generate applies them."""
    lengths: Any = data.lengths
    plain = data.written([row[:length].tolist() for row, length in zip(data.prompts, lengths, strict=True)], NEW)
    options: dict[str, Any] = {
        "prompt_lengths": lengths,
        "max_new_tokens": NEW,
        "stop_sequences": [plain[0][4:6], plain[3][7:10]],
        "processors": lsjax.processors.ForbiddenIds(np.array([plain[1][3]])),
        "top_n": 3,
        "confidence_threshold": 0.2,
        "num_speculations_schedule": "heuristic",
    }
    out = lsjax.generate(data.params, data.prompts, **SPECULATIVE, **options)
    blocks = list(lsjax.stream(data.params, data.prompts, **SPECULATIVE, **options))
    assert joined(blocks) == new_tokens(out, lengths)
    assert joined(blocks)[0] == plain[0][:6]
    assert joined(blocks)[1] != plain[1]
    for row in range(BATCH):
        start, end = lengths[row], int(out.lengths[row])
        for name, found in vars(out.scores).items():
            parts = [getattr(block.scores, name)[row, : block.counts[row]] for block in blocks]
            np.testing.assert_array_equal(np.concatenate(parts), np.asarray(found)[row, start:end])


# Rewinding.


def test_a_rewound_row_is_what_a_shorter_prompt_makes_it(data):
    options: dict[str, Any] = {"prompt_lengths": data.lengths, "max_new_tokens": 20, "pad_token_id": 7, **SPECULATIVE}
    stream = lsjax.stream(data.params, data.prompts, **options)
    written = joined(stream)
    text = [[*data.prompts[row, : data.lengths[row]].tolist(), *written[row]] for row in range(BATCH)]
    kept = np.array([1, 5, 15, *(data.lengths[3:6] + 20)])  # into the prompts, among new tokens, and everything
    state = lsjax.rewind(stream.state, kept, max_new_tokens=12)
    assert state.lengths.tolist() == kept.tolist()
    assert state.limits.tolist() == (kept + 12).tolist()
    assert not state.done.any()
    for row in range(BATCH):
        assert state.tokens[row, : kept[row]].tolist() == text[row][: kept[row]]
        assert (state.tokens[row, kept[row] :] == 7).all()
    heads = [text[row][: kept[row]] for row in range(BATCH)]
    assert joined(lsjax.Stream(data.params, state)) == data.written(heads, 12)


def test_other_tokens_follow_a_rewound_text(data):
    stream = lsjax.stream(data.params, data.prompts, max_new_tokens=15, **SPECULATIVE)
    list(stream)
    state = lsjax.rewind(stream.state, WIDTH - 2)
    assert state.limits.tolist() == [CAPACITY] * BATCH
    said = data.prompts[::-1, :7]
    found = joined(lsjax.stream(data.params, said, state=state, max_new_tokens=10))
    assert found == data.written(np.concatenate([data.prompts[:, : WIDTH - 2], said], axis=1).tolist(), 10)


def test_rewinding_takes_back_scores_and_where_new_text_begins(data):
    """A stop sequence that began before does not count; nor do scores of what is no more there."""
    (text,) = data.written([data.prompts[0].tolist()], NEW)
    stops = [text[6:8]]
    options: dict[str, Any] = {"max_new_tokens": NEW, "log_probs": True, "stop_sequences": stops, **SPECULATIVE}
    stream = lsjax.stream(data.params, data.prompts[0], **options)
    assert joined(stream) == [text[:8]]
    state = lsjax.rewind(stream.state, WIDTH + 7)
    assert state.scores is not None
    assert np.flatnonzero(state.scores.log_probs[0]).tolist() == list(range(WIDTH, WIDTH + 7))
    assert joined(lsjax.Stream(data.params, state))[0][:5] == text[7:12]
    stream = lsjax.stream(data.params, data.prompts[0], **options)
    list(stream)
    assert joined(lsjax.Stream(data.params, lsjax.rewind(stream.state, WIDTH + 6))) == [text[6:8]]


def test_rewinding_under_jit_and_vmap(data):
    state = lsjax.prefill(data.params, data.prompts, **SPECULATIVE)
    asked, expected = jnp.array([99, -3, 12, 1, 2, 3]), [12, 1, 12, 1, 2, 3]  # the nearest that there are
    found = jax.jit(lambda state, kept: lsjax.rewind(state, kept))(state, asked)
    assert found.lengths.tolist() == expected
    apart = jax.vmap(lambda kept: lsjax.rewind(state, kept).tokens)(jnp.array([3, 5]))
    for tokens, kept in zip(apart, (3, 5), strict=True):
        np.testing.assert_array_equal(tokens, lsjax.rewind(state, kept).tokens)


def test_rewinding_compiles_once(data):
    state = lsjax.prefill(data.params, data.prompts, **SPECULATIVE)
    lsjax.rewind(state, 5, max_new_tokens=3)
    with counted_compilations() as compiled:
        lsjax.rewind(lsjax.rewind(state, [6, 4, 5, 5, 5, 5], max_new_tokens=5), np.int64(2), max_new_tokens=9)
    assert compiled == []


def test_rewind_refuses(data):
    state = lsjax.prefill(data.params, data.prompts, prompt_lengths=data.lengths, **SPECULATIVE)
    refused: list[tuple[Any, str]] = [
        (0, r"lengths: expected 1\.\.3 tokens to keep of row 0, got 0"),
        ([3, 13, 1, 1, 1, 1], r"lengths: expected 1\.\.12 tokens to keep of row 1, got 13"),
        ([1, 2, 3], r"expected an int or one for each of 6 rows, got the shape \[3\]"),
        (1.5, "lengths: expected integers, got float"),
    ]
    for lengths, message in refused:
        with pytest.raises(ValueError, match=message):
            lsjax.rewind(state, lengths)
    with pytest.raises(ValueError, match="max_new_tokens: expected an int of at least 1, got 0"):
        lsjax.rewind(state, 1, max_new_tokens=0)
    with pytest.raises(TypeError, match="state: expected a DecodeState"):
        lsjax.rewind(data.params, 2)  # pyright: ignore[reportArgumentType]
