"""Stop sequences: rows end at the earliest, wherever in a block, and other options with bad values are refused."""

from typing import Any

import jax
import numpy as np
import pytest
from plain_decoding import DATA, NEW, generate, new_tokens, prompt
from support import compiled_programs

import lsjax
from lsjax.decode import generate as generate_module

pytestmark = pytest.mark.usefixtures("fewer_optimizations")


def ended(text: list[int], stops: list[list[int]], eos: tuple[int, ...] = ()) -> list[int]:
    """A text up to the earliest end of a stop sequence that lies in it, or EOS."""
    for end in range(1, len(text) + 1):
        if text[end - 1] in eos or any(len(stop) <= end and text[end - len(stop) : end] == stop for stop in stops):
            return text[:end]
    return text


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_stop_sequences_at_every_offset_of_a_block(length):
    """With K = 4 a block has up to 5 tokens; the sequences end at, before and after its edges."""
    plain = [DATA.texts[row, DATA.lengths[row] : DATA.lengths[row] + NEW].tolist() for row in range(8)]
    rounds_cut = 0
    for offset in range(8):
        stops = [[text[offset : offset + length]] for text in plain]  # each row its own
        found = generate(stop_sequences=np.array(stops))
        expected = [ended(text, stop) for text, stop in zip(plain, stops, strict=True)]
        assert [new_tokens(found, row) for row in range(8)] == expected
        tokens, lengths = np.asarray(found.tokens), np.asarray(found.lengths)
        assert (tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] == 0).all()  # padding
        rounds_cut += int((np.asarray(found.stats.drafted) < np.asarray(generate().stats.drafted)).sum())
    assert rounds_cut


def test_the_earliest_of_several_ends_wins_and_none_begins_in_the_prompt():
    plain = [DATA.texts[row, DATA.lengths[row] : DATA.lengths[row] + NEW].tolist() for row in range(8)]
    stops = [plain[0][3:5], plain[1][5:8], plain[2][2:3], plain[3][9:13], [1, 2, 3, 4, 5]]
    eos = (plain[4][6], plain[5][1])
    across = [prompt(6)[-1], plain[6][0]]  # half in the prompt
    expected = [ended(text, [*stops, across], eos) for text in plain]
    assert len({len(text) for text in expected}) > 3
    runs: list[dict[str, Any]] = [
        {},
        {"exit_layer": None},
        {"num_speculations": 1},
        {"exit_layer": 3, "num_speculations": 7},
    ]
    for options in runs:
        found = generate(stop_sequences=[*stops, across], eos_token_id=eos, **options)
        assert [new_tokens(found, row) for row in range(8)] == expected
    assert len(expected[6]) > 1
    # A stop sequence that the prompt holds whole does not end anything; in a continued text its new part counts.
    state = lsjax.prefill(
        DATA.params, plain[0][:8], exit_layer=2, eos_token_id=(), stop_sequences=[plain[0][3:5]], max_new_tokens=4
    )
    assert bool(state.active)


def test_other_sequences_of_the_same_class_compile_nothing():
    generate(stop_sequences=[[1, 2], [3]])
    compiled = compiled_programs(generate_module._generate)
    generate(stop_sequences=[[5, 6, 7], [8], [9, 9, 9, 9]])
    generate(stop_sequences=[[4]], eos_token_id=(3, 8))
    assert compiled_programs(generate_module._generate) == compiled

    @jax.jit
    def traced(stops):
        return generate(stop_sequences=stops).lengths

    stop = DATA.texts[0, DATA.lengths[0] + 3 : DATA.lengths[0] + 5]
    expected = generate(stop_sequences=[stop]).lengths
    np.testing.assert_array_equal(traced(np.array([[*stop, -1]])), expected)  # filled up on either side
    np.testing.assert_array_equal(traced(np.array([[-1, *stop]])), expected)
    np.testing.assert_array_equal(generate(stop_sequences=[]).lengths, generate().lengths)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processors": lambda logits, tokens, lengths: logits[:, :5]}, r"expected it to return float32 \[8, 251\]"),
        ({"processors": [3]}, r"processors\[0\]: expected a function"),
        ({"process_drafts": 1}, "process_drafts: expected True or False, got 1"),
        ({"log_probs": "yes"}, "log_probs: expected True or False, got 'yes'"),
        ({"top_n": 0}, r"top_n: expected an int in 1\.\.251, got 0"),
        ({"confidence_threshold": 1.5}, r"confidence_threshold: expected a number in 0\.\.1, got 1\.5"),
        ({"confidence_threshold": float("nan")}, r"confidence_threshold: expected .* got nan"),
        ({"num_speculations_schedule": "fast"}, "expected one of constant, heuristic, got 'fast'"),
        ({"stop_sequences": "end"}, r"stop_sequences: expected sequences of token ids, .* got 'end'"),
        ({"stop_sequences": 5}, r"stop_sequences: expected sequences of token ids"),
        ({"stop_sequences": [1, 2]}, r"stop_sequences: expected sequences of token ids, .* got 1 in them"),
        ({"stop_sequences": [[1], []]}, "stop_sequences: expected at least one id in a sequence, got an empty one"),
        ({"stop_sequences": [[1, -1]]}, r"stop_sequences: expected ids of at least 0, got \[1, -1\]"),
        ({"stop_sequences": [[251]]}, r"stop_sequences: expected ids in 0\.\.250 .* got 251"),
        ({"stop_sequences": np.zeros((3, 2, 2), int)}, r"stop_sequences: expected the shape .* got \[3, 2, 2\]"),
        ({"stop_sequences": np.array([[1, -1, 2]])}, "stop_sequences: expected -1 before or after"),
    ],
)
def test_bad_values_are_one_clear_error(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        generate(**options)
