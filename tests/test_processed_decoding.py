"""Processors in the loop: the text is that of plain decoding, and of transformers with its processors."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import CONFIG
from plain_decoding import (
    DATA,
    EOS,
    EOS_OF_THE_MODEL,
    FORBIDDEN,
    NEW,
    ROWS,
    generate,
    generate_once,
    new_tokens,
    plain_text,
)
from support import compiled_programs

import lsjax
from lsjax import processors as ready
from lsjax.decode import generate as generate_module
from lsjax.decode.state import DecodeState

pytestmark = pytest.mark.usefixtures("fewer_optimizations")


def of_transformers(*make):
    """Processors of transformers, each made for a prompt's length."""

    def for_row(row: int):
        torch = pytest.importorskip("torch")
        made = [m(DATA.lengths[row].item()) for m in make]

        def process(text: list[int], logits: np.ndarray) -> np.ndarray:
            scores = torch.tensor(logits[None])
            for processor in made:
                scores = processor(torch.tensor([text]), scores)
            return scores[0].numpy()

        return process

    return for_row


def counting(change):
    """The definition of a penalty on generated tokens, in NumPy."""

    def for_row(row: int):
        def process(text: list[int], logits: np.ndarray) -> np.ndarray:
            generated = np.bincount(text[DATA.lengths[row] :], minlength=len(logits))
            return logits - change(generated)

        return process

    return for_row


def theirs(name: str):
    pytest.importorskip("torch")
    from transformers.generation import logits_process

    return getattr(logits_process, name)


BIASES = {int(token): -3.0 for token in DATA.texts[0, DATA.lengths[0] :][:6]} | {11: 2.0}
SINGLE = {
    "repetition": (
        ready.RepetitionPenalty(1.4),
        lambda: of_transformers(lambda _: theirs("RepetitionPenaltyLogitsProcessor")(1.4)),
    ),
    "presence": (ready.PresencePenalty(1.5), lambda: counting(lambda n: 1.5 * (n > 0))),
    "frequency": (ready.FrequencyPenalty(0.7), lambda: counting(lambda n: 0.7 * n)),
    "n-gram": (ready.NoRepeatNgram(2), lambda: of_transformers(lambda _: theirs("NoRepeatNGramLogitsProcessor")(2))),
    "bias": (
        ready.LogitBias(list(BIASES), list(BIASES.values())),
        lambda: of_transformers(
            lambda _: theirs("SequenceBiasLogitsProcessor")({(token,): value for token, value in BIASES.items()})
        ),
    ),
    "forbidden": (
        ready.ForbiddenIds(FORBIDDEN),
        lambda: of_transformers(lambda _: theirs("SuppressTokensLogitsProcessor")(FORBIDDEN, device="cpu")),
    ),
    "least length": (
        ready.MinNewTokens(9),
        lambda: of_transformers(
            lambda length: theirs("MinNewTokensLengthLogitsProcessor")(length, 9, list(EOS), device="cpu")
        ),
    ),
}


def together():
    """All of them, one after the other."""
    parts = [make() for _, make in SINGLE.values()]

    def for_row(row: int):
        processes = [part(row) for part in parts]

        def process(text, logits):
            for one in processes:
                logits = one(text, logits)
            return logits

        return process

    return for_row


ALL = {name: ([processor], make) for name, (processor, make) in SINGLE.items()}
ALL["all"] = ([processor for processor, _ in SINGLE.values()], together)


@pytest.mark.parametrize("name", ALL)
def test_with_processors_speculative_text_is_plain_text_is_transformers_text(name):
    processors, make = ALL[name]
    eos = EOS if name == "least length" else ()
    expected = [plain_text(row, make()(row), eos) for row in range(8)]
    without = generate(eos_token_id=eos)  # one program for all
    assert [new_tokens(without, row) for row in range(8)] != expected  # it changes something
    runs: dict[str, Any] = {"plain": {"exit_layer": None}, "speculative": {}}
    if name == "all":
        runs |= {"drafts unprocessed": {"process_drafts": False}, "exit 3": {"exit_layer": 3, "num_speculations": 2}}
    for run, options in runs.items():
        found = generate_once(processors=processors, eos_token_id=eos, **options)
        assert [new_tokens(found, row) for row in range(8)] == expected, run
        if run != "plain":
            assert np.sum(found.stats.accepted) > 20


def test_least_length_moves_an_end():
    eos = EOS_OF_THE_MODEL
    early = generate(eos_token_id=eos)
    assert (np.asarray(early.lengths) - DATA.lengths[ROWS]).min() < 9
    late = generate(eos_token_id=eos, processors=ready.MinNewTokens(9))
    assert (np.asarray(late.lengths) - DATA.lengths[ROWS]).min() >= 10
    expected = [
        plain_text(
            row,
            of_transformers(lambda n: theirs("MinNewTokensLengthLogitsProcessor")(n, 9, eos, device="cpu"))(row),
            eos,
        )
        for row in range(8)
    ]
    assert [new_tokens(late, row) for row in range(8)] == expected


@pytest.mark.parametrize("twice", ["the last draft", "all drafts"])
def test_a_processor_that_sees_a_draft_twice_is_caught(monkeypatch, twice):
    """Speculation that hands a wrong history to the processors writes another text than plain decoding."""

    def by_parity(logits, tokens, lengths):
        column = np.arange(tokens.shape[1])
        last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
        times = ((tokens == last) & (column < lengths[:, None])).sum(axis=1, keepdims=True)
        return jnp.where((np.arange(logits.shape[1]) + times) % 2 == 0, logits, -jnp.inf)

    def process(text, logits):
        return np.where((np.arange(len(logits)) + text.count(text[-1])) % 2 == 0, logits, -np.inf)

    expected = [plain_text(row, process) for row in range(8)]
    right = DecodeState.process

    def wrong(self, logits, tokens, lengths):
        repeated = lengths - self.lengths  # drafts before this position
        if twice == "the last draft":
            repeated = jnp.minimum(repeated, 1)
        source = np.arange(tokens.shape[1]) - repeated[:, None]
        moved = jnp.take_along_axis(tokens, jnp.maximum(source, 0), axis=1)
        both = jnp.where(np.arange(tokens.shape[1]) < lengths[:, None], tokens, moved)
        return right(self, logits, both, lengths + repeated)

    assert [new_tokens(generate_once(processors=by_parity), row) for row in range(8)] == expected
    with monkeypatch.context() as patched:
        patched.setattr(DecodeState, "process", wrong)
        jax.clear_caches()
        found = generate_once(processors=by_parity)
    jax.clear_caches()
    assert [new_tokens(found, row) for row in range(8)] != expected


def no_odd_ids_after_even(logits, tokens, lengths):
    """A user's own: any function."""
    last = jnp.take_along_axis(tokens, lengths[:, None] - 1, axis=1)
    odd = np.arange(logits.shape[1]) % 2 == 1
    return jnp.where((last % 2 == 0) & odd, -jnp.inf, logits)


class Own(flax.struct.PyTreeNode):
    """A user's own, with traced values that all rows share and one that is static."""

    bias: Any
    scale: Any
    power: int = flax.struct.field(pytree_node=False, default=1)

    def __call__(self, logits, tokens, lengths):
        return logits * self.scale + self.bias**self.power


def test_processors_of_ones_own():
    def process(text, logits):
        odd = np.arange(len(logits)) % 2 == 1
        return np.where((text[-1] % 2 == 0) & odd, -np.inf, logits)

    expected = [plain_text(row, process) for row in range(8)]
    found = generate(processors=no_odd_ids_after_even)
    assert [new_tokens(found, row) for row in range(8)] == expected

    bias = np.random.default_rng(0).normal(0, 1, CONFIG.vocab_size).astype(np.float32)
    expected = [plain_text(row, lambda _, logits: logits * 0.5 + bias) for row in range(8)]
    found = generate(processors=[Own(bias, 0.5)])
    assert [new_tokens(found, row) for row in range(8)] == expected
    compiled = compiled_programs(generate_module._generate)
    generate(processors=[Own(2 * bias, np.float32(1.0))])
    assert compiled_programs(generate_module._generate) == compiled + 1  # Python's float has a weak type
    generate(processors=[Own(3 * bias, np.float32(1.5))])
    assert compiled_programs(generate_module._generate) == compiled + 1

    # Under vmap: not mapped, it serves all; mapped, one run after the other.
    def run(tokens, bias):
        return lsjax.generate(
            DATA.params, tokens, exit_layer=2, max_new_tokens=8, eos_token_id=(), processors=Own(bias, 0.5)
        ).tokens

    tokens, biases = DATA.prompts[:3, :1], jnp.stack([bias, 2 * bias, 0 * bias])
    alone = [run(tokens[i], bias) for i in range(3)]
    np.testing.assert_array_equal(jax.vmap(run, in_axes=(0, None))(tokens, bias), alone)
    mapped = jax.vmap(run, in_axes=(None, 0))(tokens[0], biases)
    np.testing.assert_array_equal(mapped, [run(tokens[0], each) for each in biases])


def test_processors_round_by_round_and_continued():
    """New tokens are those after what continued the text, for penalties that count them."""
    processors = [ready.FrequencyPenalty(0.7), ready.MinNewTokens(3)]
    expected = generate(processors=processors)
    options = {"exit_layer": 2, "eos_token_id": (), "processors": processors}
    state = lsjax.prefill(
        DATA.params, DATA.prompts[ROWS], prompt_lengths=DATA.lengths[ROWS], max_new_tokens=NEW, capacity=80, **options
    )
    while bool(state.active):
        state = lsjax.decode_round(DATA.params, state)
    np.testing.assert_array_equal(np.asarray(state.tokens)[:, : 12 + NEW], expected.tokens)
    more = np.tile(np.arange(5), (8, 1))
    lengths = np.asarray(state.lengths)
    texts = [
        row[:length].tolist() + list(range(5)) for row, length in zip(np.asarray(state.tokens), lengths, strict=True)
    ]
    state = lsjax.prefill(DATA.params, more, state=state, max_new_tokens=6)
    while bool(state.active):
        state = lsjax.decode_round(DATA.params, state)
    for row, text in enumerate(texts):
        alone = lsjax.generate(DATA.params, text, max_new_tokens=6, **options)
        np.testing.assert_array_equal(np.asarray(state.tokens)[row, : len(text) + 6], alone.tokens)
