"""Logits processors: transformers' values and NumPy's, rows of any length, any values without compiling, bad input."""

import functools
import itertools
from typing import Any, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import compiled_programs, temporaries_of

from lsjax import processors as ready
from lsjax.decode.processor_checks import check_processors
from lsjax.decode.processors import Processors, compose

BATCH, SLOTS, VOCAB = 6, 24, 13  # so few ids that every row repeats some
LENGTHS = np.array([1, 2, 5, 12, 23, 24], np.int32)
PROMPTS = np.array([1, 1, 3, 12, 4, 0], np.int32)
PER_ROW = np.array([0.5, 1.0, 1.3, 2.0, 0.9, 1.7], np.float32)


@functools.cache
def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(BATCH, VOCAB)).astype(np.float32)
    logits[:, 5] = 0.0
    return logits, rng.integers(0, VOCAB, (BATCH, SLOTS), dtype=np.int32), LENGTHS


@jax.jit
def run(processor, logits, tokens, lengths):
    return processor(logits, tokens, lengths)


def outcome(processor: Any) -> np.ndarray:
    """What it does to the rows, whatever stands after their ends."""
    logits, tokens, lengths = data()
    composed = compose(processor)
    found = []
    for garbage in (0, 3, VOCAB, -1, -VOCAB, 2**31 - 1, -(2**31)):
        rows = np.where(np.arange(SLOTS) < lengths[:, None], tokens, np.int32(garbage))
        found.append(np.asarray(run(composed, logits, rows, lengths)))
        np.testing.assert_array_equal(found[-1], found[0])
    assert found[0].dtype == np.float32
    return found[0]


def texts() -> list[np.ndarray]:
    _, tokens, lengths = data()
    return [row[:length] for row, length in zip(tokens, lengths, strict=True)]


def transformers_outcome(make) -> np.ndarray:
    """Each row alone through the processor ``make(row)`` of transformers."""
    torch = pytest.importorskip("torch")
    rows = []
    for index, (logits, text) in enumerate(zip(data()[0], texts(), strict=True)):
        ids, scores = torch.tensor(text[None]).long(), torch.tensor(logits[None])
        rows.append(make(index)(ids, scores)[0].numpy())
    return np.array(rows)


def assert_changed_to(found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (found != data()[0]).any()  # or there is nothing to compare


@pytest.mark.parametrize("penalty", [1.3, 0.6, PER_ROW], ids=["more", "less", "per row"])
def test_repetition_penalty_is_that_of_transformers(penalty):
    pytest.importorskip("torch")
    from transformers import RepetitionPenaltyLogitsProcessor as Theirs

    expected = transformers_outcome(lambda row: Theirs(float(np.broadcast_to(penalty, BATCH)[row])))
    assert_changed_to(outcome(ready.RepetitionPenalty(penalty)), expected)


@pytest.mark.parametrize("size", [1, 2, 3, 12, SLOTS])
def test_ngrams_are_forbidden_as_in_transformers(size):
    torch = pytest.importorskip("torch")
    from transformers import NoRepeatNGramLogitsProcessor as Theirs

    # Row 3 is one token over and over, row 5 a cycle of two with an end that has no follower yet.
    logits, tokens, lengths = data()
    tokens = tokens.copy()
    tokens[3], tokens[5] = 7, np.arange(SLOTS) % 2
    found = np.asarray(run(ready.NoRepeatNgram(size), logits, tokens, lengths))
    for row in range(BATCH):
        ids = torch.tensor(tokens[row : row + 1, : lengths[row]]).long()
        expected = Theirs(size)(ids, torch.tensor(logits[row : row + 1]))[0].numpy()
        np.testing.assert_array_equal(found[row], expected)
    assert np.isneginf(found).any() == (size < SLOTS)


def test_ngrams_do_not_reach_past_the_end():
    for size in (1, 2, 3, SLOTS, SLOTS + 1):
        outcome(ready.NoRepeatNgram(size))
    found = outcome(ready.NoRepeatNgram(2))
    for row, text in enumerate(texts()):
        followers = {int(b) for a, b in itertools.pairwise(text) if a == text[-1]}
        assert set(np.flatnonzero(np.isneginf(found[row])).tolist()) == followers


def test_biases_are_those_of_transformers():
    pytest.importorskip("torch")
    from transformers import SequenceBiasLogitsProcessor as Theirs

    biases: Any = {(0,): -2.5, (7,): 3.0, (VOCAB - 1,): -float("inf")}
    expected = transformers_outcome(lambda _: Theirs(biases))
    ids, values = [key[0] for key in biases], list(biases.values())
    assert_changed_to(outcome(ready.LogitBias(ids, values)), expected)
    # -1 and what stands beside it are nothing, here and where check_processors fills up.
    assert_changed_to(outcome(ready.LogitBias([-1, *ids, -1], [9.0, *values, 9.0])), expected)
    checked = check_processors(ready.LogitBias(ids, values), batch=BATCH, slots=SLOTS, vocab_size=VOCAB)
    assert_changed_to(outcome(checked), expected)


def test_biases_of_each_row_and_of_one_token_twice():
    rng = np.random.default_rng(1)
    ids, values = rng.integers(-1, VOCAB, (BATCH, 9)), rng.normal(size=(BATCH, 9))
    expected = data()[0].astype(np.float64)
    for row, column in np.ndindex(*ids.shape):
        if ids[row, column] >= 0:
            expected[row, ids[row, column]] += values[row, column]
    np.testing.assert_allclose(outcome(ready.LogitBias(ids, values)), expected, atol=1e-6)
    shared = outcome(ready.LogitBias(ids[0], values))
    np.testing.assert_array_equal(shared, outcome(ready.LogitBias(np.tile(ids[0], (BATCH, 1)), values)))


def test_ids_are_forbidden_as_in_transformers():
    pytest.importorskip("torch")
    from transformers import SuppressTokensLogitsProcessor as Theirs

    ids = [0, 4, VOCAB - 1]
    assert_changed_to(outcome(ready.ForbiddenIds([*ids, -1])), transformers_outcome(lambda _: Theirs(ids)))
    rows = np.array([[-1, -1], [0, 1], [2, -1], [3, 3], [VOCAB - 1, 0], [5, 6]])
    expected = transformers_outcome(lambda row: Theirs([token for token in rows[row] if token >= 0]))
    assert_changed_to(outcome(ready.ForbiddenIds(rows)), expected)
    np.testing.assert_array_equal(outcome(ready.ForbiddenIds(3)), outcome(ready.ForbiddenIds([3])))


@pytest.mark.parametrize("count", [0, 1, 2, 19, np.array([0, 1, 2, 1, 20, 24])], ids=str)
@pytest.mark.parametrize("prompts", [PROMPTS, 1], ids=["per row", "one"])
def test_the_end_is_forbidden_as_in_transformers(count, prompts):
    pytest.importorskip("torch")
    from transformers import MinNewTokensLengthLogitsProcessor as Theirs

    def theirs(row):
        return Theirs(int(np.broadcast_to(prompts, BATCH)[row]), int(np.broadcast_to(count, BATCH)[row]), [2, 9])

    expected = transformers_outcome(theirs)
    found = outcome(ready.MinNewTokens(count, [2, 9, -1, -1], prompts))
    np.testing.assert_array_equal(found, expected)
    assert np.isneginf(found).any() == (np.max(count) > 0)
    assert not np.isneginf(found[:, [0, 1, 3, 12]]).any()


def test_each_row_ends_in_its_own_way():
    ends = np.array([[0, -1], [1, 2], [3, -1], [4, -1], [5, 6], [7, -1]])
    found = outcome(ready.MinNewTokens(SLOTS + 1, ends, PROMPTS))
    expected = [sorted({*row} - {-1}) for row in ends.tolist()]
    assert [np.flatnonzero(np.isneginf(row)).tolist() for row in found] == expected


def generated_counts(prompts) -> np.ndarray:
    starts = np.broadcast_to(prompts, BATCH)
    return np.array([np.bincount(text[start:], minlength=VOCAB) for text, start in zip(texts(), starts, strict=True)])


@pytest.mark.parametrize("penalty", [0.7, -1.5, PER_ROW], ids=["positive", "negative", "per row"])
@pytest.mark.parametrize("prompts", [PROMPTS, 0, 2], ids=["per row", "everything", "one"])
def test_presence_and_frequency_count_what_was_generated(penalty, prompts):
    counts = generated_counts(prompts)
    assert counts.max() > 1
    assert (counts == 0).any()
    logits = data()[0].astype(np.float64)
    column = np.broadcast_to(penalty, BATCH).astype(np.float64)[:, None]
    found = outcome(ready.PresencePenalty(penalty, prompts))
    np.testing.assert_allclose(found, logits - column * (counts > 0), atol=1e-6)
    found = outcome(ready.FrequencyPenalty(penalty, prompts))
    np.testing.assert_allclose(found, logits - column * counts, atol=3e-6)


class Mine(flax.struct.PyTreeNode):
    prompt_lengths: Any = None

    def __call__(self, logits, tokens, lengths):
        return logits + (lengths - self.prompt_lengths)[:, None]


def test_what_a_run_gives_is_bound_where_it_was_left_out():
    eos = np.array([[2, 9]] * BATCH)
    given = [
        ready.PresencePenalty(0.5),
        ready.FrequencyPenalty(0.25, 0),
        ready.MinNewTokens(4),
        Mine(),
        ready.ForbiddenIds([0]),
    ]
    expected = [
        ready.PresencePenalty(0.5, PROMPTS),
        ready.FrequencyPenalty(0.25, 0),
        ready.MinNewTokens(4, eos, PROMPTS),
        Mine(PROMPTS),
        ready.ForbiddenIds([0]),
    ]
    np.testing.assert_array_equal(outcome(compose(given).bind(PROMPTS, eos)), outcome(expected))
    checked = check_processors(given, batch=BATCH, slots=SLOTS, vocab_size=VOCAB)
    np.testing.assert_array_equal(outcome(checked.bind(PROMPTS, eos)), outcome(expected))
    for index, field in [(0, r"PresencePenalty\.prompt_lengths"), (2, r"MinNewTokens\.prompt_lengths")]:
        with pytest.raises(ValueError, match=field + ": expected a value, got None, .* bind"):
            outcome(given[index])


def double(logits, tokens, lengths):
    return 2 * logits


def halve_long_rows(logits, tokens, lengths):
    return jnp.where(lengths[:, None] > 4, logits / 2, logits)


def every_kind(scale: Any = 1.0, ids: Any = (1, 2, 3)) -> list[Any]:
    return [
        ready.LogitBias(ids, scale * np.array([1.0, -2.0, 0.5])),
        ready.RepetitionPenalty(1.1 * scale),
        ready.NoRepeatNgram(3),
        double,
        ready.PresencePenalty(0.3 * scale, PROMPTS),
        ready.FrequencyPenalty(0.2 * scale, PROMPTS),
        ready.ForbiddenIds(ids),
        ready.MinNewTokens(int(5 * scale), ids, PROMPTS),
    ]


def test_composed_processors_apply_from_first_to_last():
    logits, tokens, lengths = data()
    expected: Any = logits
    for processor in every_kind():
        expected = run(compose(processor), expected, tokens, lengths)
    np.testing.assert_allclose(outcome(every_kind()), expected, rtol=1e-6)
    nested = [compose(every_kind()[:3]), *every_kind()[3:5], compose(every_kind()[5:])]
    assert jax.tree.structure(compose(nested)) == jax.tree.structure(compose(every_kind()))
    np.testing.assert_array_equal(outcome(nested), outcome(every_kind()))
    bias = ready.LogitBias([0], [10.0])
    assert (outcome([bias, double])[:, 0] - outcome([double, bias])[:, 0] > 9).all()
    np.testing.assert_array_equal(outcome([]), logits)
    np.testing.assert_array_equal(outcome(halve_long_rows)[:2], logits[:2])


def test_rows_are_the_same_alone_and_in_any_order():
    logits, tokens, lengths = data()
    processor = compose(every_kind()).to_rows(BATCH)
    for leaf in jax.tree.leaves(processor):
        assert leaf.shape[0] == BATCH
    together = np.asarray(run(processor, logits, tokens, lengths))
    np.testing.assert_allclose(together, outcome(every_kind()), rtol=1e-6)
    for order in ([3, 0, 5, 1, 4, 2], [1], [5]):
        taken = functools.partial(np.take, indices=order, axis=0)
        some = run(*jax.tree.map(taken, (processor, logits, tokens, lengths)))
        np.testing.assert_allclose(some, together[order], rtol=1e-6)


def test_vmap_over_values_and_over_rows():
    logits, tokens, lengths = data()
    scales = np.array([0.5, 1.0, 1.7])

    def one(scale, logits, tokens, lengths):
        kinds = [ready.RepetitionPenalty(scale), ready.FrequencyPenalty(scale, 2), ready.LogitBias([1], scale[None])]
        return compose([*kinds, ready.NoRepeatNgram(2)])(logits, tokens, lengths)

    found = jax.vmap(one, in_axes=(0, None, None, None))(scales, logits, tokens, lengths)
    for scale, values in zip(scales, found, strict=True):
        np.testing.assert_allclose(values, one(jnp.array(scale), logits, tokens, lengths), rtol=1e-6)

    processor = compose(every_kind()).to_rows(BATCH)
    halves = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), (processor, logits, tokens, lengths))
    np.testing.assert_allclose(jax.vmap(run)(*halves).reshape(BATCH, VOCAB), outcome(every_kind()), rtol=1e-6)


def test_other_values_compile_nothing():
    arguments = data()

    def checked(*options):
        return check_processors(every_kind(*options), batch=BATCH, slots=SLOTS, vocab_size=VOCAB)

    function = jax.jit(lambda processor, *arguments: processor(*arguments))
    first = np.asarray(function(checked(), *arguments))
    others = [(2,), (np.float64(0.7),), (1.5, [4, 5, 6]), (1.5, np.array([4, -1, 12], np.int64)), (jnp.float32(3.0),)]
    for options in others:
        assert (np.asarray(function(checked(*options), *arguments)) != first).any()
    assert compiled_programs(function) == 1
    few = [ready.ForbiddenIds(range(count)) for count in (0, 1, 4)]
    checked_few = [check_processors(one, batch=BATCH, slots=SLOTS, vocab_size=VOCAB) for one in few]
    found = [np.isneginf(function(one, *arguments)).sum(1).tolist() for one in checked_few]
    assert found == [[count] * BATCH for count in (0, 1, 4)]
    assert compiled_programs(function) == 2
    function(compose([double, ready.RepetitionPenalty(PER_ROW)]), *arguments)
    function(compose([double, ready.RepetitionPenalty(PER_ROW + 1)]), *arguments)
    assert compiled_programs(function) == 3


def test_no_intermediate_is_larger_than_the_logits():
    batch, slots, vocab = 4, 512, 4096
    shapes: list[Any] = [((batch, vocab), np.float32), ((batch, slots), np.int32), ((batch,), np.int32)]
    arguments = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    per_row = [
        ready.RepetitionPenalty(1.3),
        ready.FrequencyPenalty(0.5, 3),
        ready.PresencePenalty(0.5, 3),
        ready.NoRepeatNgram(4),
        ready.LogitBias([1, 2], [0.5, 0.25]),
    ]
    for processor in per_row:
        compiled = run.lower(compose(processor), *arguments).compile()
        assert temporaries_of(compiled) < 2 * 4 * batch * (vocab + slots)


def test_rows_on_two_devices_stay_where_they_are():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("rows",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))
    arguments = jax.device_put((compose(every_kind()).to_rows(BATCH), *data()), rows)
    text = str(run.lower(*arguments).compile().as_text())
    assert "HloModule" in text
    for collective in ("all-gather", "all-reduce", "all-to-all", "collective-permute"):
        assert collective not in text
    found = run(*arguments)
    assert found.sharding.is_equivalent_to(rows, 2)
    np.testing.assert_allclose(found, outcome(every_kind()), rtol=1e-6)


def test_a_row_without_any_token_left_is_minus_infinity():
    found = outcome([ready.ForbiddenIds(range(VOCAB)), ready.RepetitionPenalty(2.0), ready.FrequencyPenalty(1.0, 0)])
    assert np.isneginf(found).all()
    assert jnp.argmax(found, axis=1).tolist() == [0] * BATCH


def shrink(logits, tokens, lengths):
    return logits[:, 1:]


def to_half(logits, tokens, lengths):
    return logits.astype(jnp.bfloat16)


def nothing(logits, tokens, lengths):
    return None


def two_arguments(tokens, logits):
    return logits


def look_at_values(logits, tokens, lengths):
    return logits if lengths[0] > 1 else 2 * logits


NAN, INF = float("nan"), float("inf")
BAD_VALUES = [
    (ready.RepetitionPenalty(0), r"RepetitionPenalty\.penalty: expected finite numbers above 0, got 0\.0"),
    (ready.RepetitionPenalty(-1.5), "expected finite numbers above 0, got -1.5"),
    (ready.RepetitionPenalty(NAN), "expected finite numbers above 0, got nan"),
    (ready.RepetitionPenalty(1e300), "expected finite numbers above 0, got inf"),
    (ready.RepetitionPenalty(1e-300), "expected finite numbers above 0, got 0.0"),
    (ready.RepetitionPenalty([1.0, 1.0, 1.0, -2.0, 1.0, 1.0]), "expected finite numbers above 0, got -2.0"),
    (ready.RepetitionPenalty([1.0, 2.0]), r"expected the shape \[\] or \[6\], one for each row, got \[2\]"),
    (ready.RepetitionPenalty(None), r"RepetitionPenalty\.penalty: expected numbers, got NoneType"),
    (ready.LogitBias(None, [1.0]), r"LogitBias\.ids: expected integers, got NoneType"),
    (ready.RepetitionPenalty("high"), r"RepetitionPenalty\.penalty: expected numbers, got str"),
    (ready.PresencePenalty(NAN), r"PresencePenalty\.penalty: expected finite numbers, got nan"),
    (ready.FrequencyPenalty(INF), r"FrequencyPenalty\.penalty: expected finite numbers, got inf"),
    (ready.FrequencyPenalty(1.0, -1), r"FrequencyPenalty\.prompt_lengths: expected at least 0, got -1"),
    (ready.FrequencyPenalty(1.0, 1.5), r"FrequencyPenalty\.prompt_lengths: expected integers, got float64"),
    (ready.NoRepeatNgram(0), r"NoRepeatNgram\.size: expected an int of at least 1, got 0"),
    (ready.NoRepeatNgram(cast(Any, 2.0)), r"NoRepeatNgram\.size: expected an int of at least 1, got 2.0"),
    (ready.LogitBias([VOCAB], [1.0]), r"LogitBias\.ids: expected ids in 0\.\.12 \(-1: none\), got 13"),
    (ready.LogitBias([-2], [1.0]), r"LogitBias\.ids: expected ids in 0\.\.12 \(-1: none\), got -2"),
    (ready.LogitBias([1.5], [1.0]), r"LogitBias\.ids: expected integers, got float64"),
    (ready.LogitBias([1, 2], [1.0]), r"LogitBias\.values: expected one for each of the 2 ids, got 1"),
    (ready.LogitBias([1], [INF]), r"LogitBias\.values: expected finite numbers or -inf, got inf"),
    (ready.LogitBias([1], [NAN]), r"LogitBias\.values: expected finite numbers or -inf, got nan"),
    (ready.ForbiddenIds([0, 2**40]), r"ForbiddenIds\.ids: expected int32, got \[0, 1099511627776\]"),
    (ready.ForbiddenIds([[1], [2]]), r"expected the shape \[n\] or \[6, n\], one for each row, got \[2, 1\]"),
    (ready.ForbiddenIds(range(VOCAB)), "ForbiddenIds.ids: expected to leave some of the 13 ids, got all of them"),
    (ready.MinNewTokens(-1), r"MinNewTokens\.count: expected at least 0, got -1"),
    (ready.MinNewTokens(3, 99), r"MinNewTokens\.eos_token_id: expected ids in 0\.\.12 \(-1: none\), got 99"),
    (ready.MinNewTokens(True), r"MinNewTokens\.count: expected integers, got bool"),
    (shrink, r"processors\[1\]: expected it to return float32 \[6, 13\], got float32 \[6, 12\] of .*shrink"),
    (to_half, r"processors\[1\]: expected it to return float32 \[6, 13\], got bfloat16 \[6, 13\] of .*to_half"),
    (nothing, r"processors\[1\]: expected it to return float32 \[6, 13\], got None"),
]


def check(*processors):
    return check_processors(processors, batch=BATCH, slots=SLOTS, vocab_size=VOCAB)


@pytest.mark.parametrize(("processor", "message"), BAD_VALUES)
def test_bad_values_are_refused(processor, message):
    with pytest.raises(ValueError, match=message):
        check(double, processor)


@pytest.mark.parametrize(
    ("processor", "got"),
    [
        (5, "got 5"),
        (None, "got None"),
        ({"penalty": 1.2}, "got {'penalty': 1.2}"),
        (ready.RepetitionPenalty, "got the class RepetitionPenalty, not one made of it"),
    ],
)
def test_what_is_no_function_is_refused(processor, got):
    with pytest.raises(TypeError, match=r"processors\[1\]: expected a function of \(logits, tokens, lengths\), " + got):
        check(double, processor)


def test_an_unhashable_function_is_refused():
    class Unhashable:
        __hash__: Any = None

        def __call__(self, logits, tokens, lengths):
            return logits

    with pytest.raises(TypeError, match=r"processors\[0\]: expected .* that is hashable, .* got Unhashable"):
        check(Unhashable())


@pytest.mark.parametrize(
    ("function", "error"), [(two_arguments, TypeError), (look_at_values, jax.errors.TracerBoolConversionError)]
)
def test_an_error_within_a_function_names_it(function, error):
    with pytest.raises(error) as found:
        check(double, function)
    assert any("processors[1]: expected a function" in note for note in found.value.__notes__)


def test_traced_values_pass_and_their_shapes_are_checked():
    logits, tokens, lengths = map(jnp.asarray, data())

    @jax.jit
    def penalized(penalty):
        return check(ready.RepetitionPenalty(penalty), ready.LogitBias([1], penalty[:1]))(logits, tokens, lengths)

    @jax.jit
    def biased(ids):
        return check(ready.LogitBias(ids, [0.5, 1.0, 2.0]))(logits, tokens, lengths)

    ids = np.array([3, -1, 12])
    np.testing.assert_array_equal(biased(ids), outcome(ready.LogitBias(ids, [0.5, 1.0, 2.0])))
    expected = outcome([ready.RepetitionPenalty(PER_ROW), ready.LogitBias([1], PER_ROW[:1])])
    np.testing.assert_allclose(penalized(PER_ROW), expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"expected the shape \[\] or \[6\], one for each row, got \[5\]"):
        penalized(PER_ROW[:5])


def test_good_values_pass_as_one_pytree():
    found = check(*every_kind(), compose(halve_long_rows))
    assert isinstance(found, Processors)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found))
    np.testing.assert_array_equal(outcome(found), outcome([*every_kind(), halve_long_rows]))
