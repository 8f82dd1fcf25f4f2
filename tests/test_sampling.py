"""Sampling: the distributions that are drawn from, and that speculation leaves them as they are."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import CONFIG, case
from scipy import stats
from support import compiled_programs, random_params

import lsjax
from lsjax import processors as ready
from lsjax.decode import generate as generate_module
from lsjax.decode.sampling import Sampling, make_sampling

pytestmark = pytest.mark.usefixtures("fewer_optimizations")

VOCAB = 11
SMALL = lsjax.LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
)
KEYS = 20_480
PROMPT = np.array([3, 1, 4], np.int32)


def filtered(logits, **options) -> np.ndarray:
    batch = logits.shape[0]
    sampling = make_sampling(batch, key=jax.random.key(0), **options)
    assert isinstance(sampling, Sampling)
    return np.array(jax.jit(lambda sampling, logits: sampling.filter(logits))(sampling, jnp.asarray(logits)))


@pytest.mark.parametrize("vocab", [7, 1000])
def test_filters_are_those_of_transformers(vocab):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (5, vocab)).astype(np.float32)
    logits[1] = np.round(logits[1])  # many equals
    warpers = {
        "temperature": (theirs.TemperatureLogitsWarper, (0.3, 1.7)),
        "top_k": (theirs.TopKLogitsWarper, (1, 3, vocab, vocab + 5)),
        "top_p": (theirs.TopPLogitsWarper, (1e-9, 0.35, 0.8, 1.0)),
        "min_p": (theirs.MinPLogitsWarper, (0.0, 0.07, 0.6, 1.0)),
    }
    chosen = [{name: value} for name, (_, values) in warpers.items() for value in values]
    chosen += [{name: rng.choice(values).item() for name, (_, values) in warpers.items()} for _ in range(20)]
    for options in chosen:
        expected = torch.tensor(logits)
        for name, value in options.items():  # in this order
            expected = warpers[name][0](value)(None, expected)
        found, expected = filtered(logits, **options), expected.numpy()
        if "top_p" in options:  # which of several equals it keeps is left open by torch's sort
            found[1], expected[1] = np.sort(found[1]), np.sort(expected[1])
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=str(options))


def test_options_hold_for_their_own_row_and_every_position():
    logits = np.random.default_rng(0).normal(0, 2, (3, 4, 50)).astype(np.float32)
    options = {"temperature": [0.5, 1.0, 0.0], "top_k": [3, 50, 5], "top_p": [1.0, 0.6, 0.9], "min_p": [0.0, 0.1, 0.2]}
    found = filtered(logits, **{name: np.array(values) for name, values in options.items()})
    for row in range(3):
        alone = {name: values[row] for name, values in options.items()}
        for position in range(4):
            np.testing.assert_array_equal(
                found[row, position], filtered(logits[row, position][None], **alone)[0], err_msg=str(alone)
            )
    assert (np.isfinite(found[2]).sum(axis=-1) == 1).all()  # temperature 0
    assert (found[2].argmax(axis=-1) == logits[2].argmax(axis=-1)).all()


@pytest.fixture(scope="module")
def params():
    """A model whose early layers differ from the last one, though not in everything."""
    return random_params(SMALL, 1, deep_from=1, deep_scale=1.0)


def texts(params, new: int, **options: Any) -> np.ndarray:
    """``[KEYS, new]`` tokens, each row with a key of its own."""
    keys = jax.random.split(jax.random.key(0), KEYS)
    out = lsjax.generate(
        params, np.tile(PROMPT, (KEYS, 1)), key=keys, max_new_tokens=new, eos_token_id=(), capacity=16, **options
    )
    return np.asarray(out.tokens)[:, len(PROMPT) :]


def exact(params, new: int, processors: Any = (), **options) -> np.ndarray:
    """The probability of every text of ``new`` tokens, ``[VOCAB] * new``, from full forwards in NumPy float64."""
    found = np.ones(())
    for length in range(new):
        prefixes = np.array(list(itertools.product(range(VOCAB), repeat=length)), np.int32).reshape(
            VOCAB**length, length
        )
        rows = np.concatenate([np.tile(PROMPT, (len(prefixes), 1)), prefixes], axis=1)
        logits = np.asarray(lsjax.forward(params, rows), np.float32)[:, -1]
        for processor in processors:
            logits = processor(jnp.asarray(logits), rows, np.full(len(rows), rows.shape[1]))
        logits = np.asarray(logits)
        if options:
            logits = filtered(logits, **options)
        p = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        found = found[..., None] * p.reshape(*[VOCAB] * length, VOCAB)
    return found


def p_value(found: np.ndarray, expected: np.ndarray) -> float:
    """Chi-square of texts against their probabilities, rare ones put together; 0 for an impossible text."""
    index = np.ravel_multi_index(tuple(found.T), expected.shape)
    counts, wanted = np.bincount(index, minlength=expected.size), expected.reshape(-1) * len(found)
    if counts[wanted == 0].any():
        return 0.0
    common = wanted >= 8
    counts = np.append(counts[common], counts[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    if wanted[-1] < 8:  # too few for a bin of their own
        counts, wanted = (np.append(x[:-2], x[-2:].sum()) for x in (counts, wanted))
    if len(wanted) == 1:
        return 1.0
    return float(stats.chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue)


OPTIONS = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"temperature": 1.4, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
]
PROGRAMS = [
    {"exit_layer": 1, "num_speculations": 1},
    {"exit_layer": 1, "num_speculations": 3},
    {"exit_layer": 2, "num_speculations": 2},
    {"exit_layer": 1, "num_speculations": 3, "greedy_drafts": True},
    {},
]


def test_drafts_and_targets_differ(params):
    p, *drafts = (jax.nn.softmax(lsjax.forward(params, PROMPT[None], num_layers=n)[:, -1]) for n in (3, 1, 2))
    for q in drafts:
        assert 0.2 < 0.5 * jnp.abs(p - q).sum() < 0.6


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[5]])
def test_whole_texts_are_distributed_as_plain_sampling_writes_them(params, program, options):
    found = texts(params, 3, **program, **options)
    expected = exact(params, 3, **options)
    tests = 3 * len(PROGRAMS) * 2
    for length in (1, 2, 3):
        marginal = expected.sum(axis=tuple(range(length, 3)))
        assert p_value(found[:, :length], marginal) > 0.001 / tests, length


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS[1:5])
def test_each_option_alone(params, options):
    found = texts(params, 2, exit_layer=1, num_speculations=2, **options)
    assert p_value(found, exact(params, 2, **options)) > 0.001 / 4


def test_with_everything_that_changes_drafts_and_logits(params):
    """Fewer and shorter drafts, of some ids only, and a history that each draft changes."""
    options: dict[str, Any] = {"temperature": 1.2, "top_k": 8}
    processors = [ready.RepetitionPenalty(1.8), ready.NoRepeatNgram(2), ready.LogitBias([2, 5], [1.0, -0.5])]
    drafting = {"confidence_threshold": 0.45, "num_speculations_schedule": "heuristic"}
    prepared = lsjax.prepare(params, draft_vocab=np.arange(1, 9))
    expected = exact(params, 3, processors, **options)
    assert 0.5 * np.abs(expected - exact(params, 3, **options)).sum() > 0.2
    for process_drafts in (True, False):
        found = texts(
            prepared,
            3,
            exit_layer=1,
            num_speculations=2,
            processors=processors,
            process_drafts=process_drafts,
            **options,
            **drafting,
        )
        assert p_value(found, expected) > 0.001 / 2


def unfiltered_q(self, logits, positions):
    token, _ = right_draft(self, logits, positions)
    return token, jax.nn.softmax(logits)


right_draft, right_accept = Sampling.draw_draft, Sampling.accept


def correction_from(distribution):
    """A wrong rule: what follows the kept drafts is drawn from another distribution."""

    def accept(self, drafts, drafted, logits, counts, start):
        accepted, tokens = right_accept(self, drafts, drafted, logits, counts, start)
        width = drafts.shape[1]
        at = jnp.minimum(accepted, width - 1)
        if distribution == "p":  # where a draft was rejected: no residual
            replaced, source = accepted < counts, self.filter(logits)
            row = jnp.take_along_axis(source, accepted[:, None, None], axis=1)[:, 0]
        else:  # the bonus from q
            replaced, source = accepted == counts, jnp.log(drafted)
            row = jnp.take_along_axis(source, at[:, None, None], axis=1)[:, 0]
        wrong = self.draw(row, start + accepted)
        here = (jnp.arange(width + 1) == accepted[:, None]) & replaced[:, None]
        return accepted, jnp.where(here, wrong[:, None], tokens)

    return accept


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("draw_draft", unfiltered_q),
        ("accept", correction_from("p")),
        ("accept", correction_from("q")),
    ],
    ids=["q that was not drawn from", "no residual", "bonus from q"],
)
def test_wrong_rules_are_rejected(params, monkeypatch, name, wrong):
    options = {"temperature": 0.7, "top_p": 0.8}
    monkeypatch.setattr(Sampling, name, wrong)
    jax.clear_caches()
    try:
        found = texts(params, 3, exit_layer=1, num_speculations=1, **options)
    finally:
        monkeypatch.undo()
        jax.clear_caches()
    assert p_value(found, exact(params, 3, **options)) < 1e-6


def test_a_temperature_of_0_is_exactly_greedy():
    data = case(4, 0.15)
    options = {"prompt_lengths": data.lengths, "exit_layer": 2, "max_new_tokens": 24}
    expected = lsjax.generate(data.params, data.prompts, **options)
    without_key = lsjax.generate(data.params, data.prompts, temperature=0, **options)
    drawn = lsjax.generate(data.params, data.prompts, temperature=0.0, key=jax.random.key(1), **options)
    for found in (without_key, drawn):
        jax.tree.map(np.testing.assert_array_equal, found, expected)
    mixed = np.where(np.arange(16) % 2, 0.0, 1.0)
    found = lsjax.generate(data.params, data.prompts, temperature=mixed, key=jax.random.key(1), **options)
    same = (np.asarray(found.tokens) == np.asarray(expected.tokens)).all(axis=1)
    assert same[1::2].all()
    assert not same[::2].all()


def test_a_row_draws_the_same_alone_in_a_batch_and_permuted():
    data, keys = case(4, 0.15), jax.random.split(jax.random.key(3), 16)
    options = {"exit_layer": 2, "max_new_tokens": 20, "temperature": 1.3, "eos_token_id": ()}

    def run(rows, **more):
        return np.asarray(
            lsjax.generate(
                data.params, data.prompts[rows], prompt_lengths=data.lengths[rows], key=keys[rows], **options, **more
            ).tokens
        )

    together = run(np.arange(16))
    order = np.random.default_rng(0).permutation(16)
    np.testing.assert_array_equal(run(order), together[order])
    np.testing.assert_array_equal(run(np.arange(16), capacity=100), together)
    for row in (0, 5):
        length = data.lengths[row]
        alone = lsjax.generate(data.params, data.prompts[row : row + 1, :length], key=keys[row : row + 1], **options)
        np.testing.assert_array_equal(alone.tokens[0], together[row, : length + 20])
    # One key for all: row i folds i into it.
    folded = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.key(3), np.arange(16))
    scalar, each = (
        lsjax.generate(data.params, data.prompts, prompt_lengths=data.lengths, key=key, **options).tokens
        for key in (jax.random.key(3), folded)
    )
    np.testing.assert_array_equal(scalar, each)


def test_round_by_round_and_under_vmap_the_draws_are_the_same():
    data, key = case(4, 0.15), jax.random.key(5)
    options = {"exit_layer": 2, "max_new_tokens": 16, "temperature": 0.9, "top_k": 30, "eos_token_id": ()}
    expected = lsjax.generate(data.params, data.prompts, prompt_lengths=data.lengths, key=key, **options)
    state = lsjax.prefill(data.params, data.prompts, prompt_lengths=data.lengths, key=key, **options)
    while bool(state.active):
        state = lsjax.decode_round(data.params, state)
    np.testing.assert_array_equal(np.asarray(state.tokens)[:, :28], expected.tokens)
    keys = jax.random.split(key, 3)
    run = jax.vmap(lambda key: lsjax.generate(data.params, data.prompts[0], key=key, **options).tokens)
    mapped = run(keys)
    for index in range(3):
        alone = lsjax.generate(data.params, data.prompts[0], key=keys[index], **options)
        np.testing.assert_array_equal(mapped[index], alone.tokens)
    assert len({tuple(row.tolist()) for row in np.asarray(mapped)}) == 3


def test_other_values_compile_nothing():
    data = case(4, 0.15)

    def run(seed, temperature, top_k, top_p, min_p):
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        lsjax.generate(data.params, data.prompts, key=jax.random.key(seed), exit_layer=2, max_new_tokens=8, **options)

    run(0, 1.0, 5, 0.9, 0.1)
    compiled = compiled_programs(generate_module._generate)
    run(1, 0.0, 7, 1.0, 0.0)
    run(2, np.linspace(0, 1, 16), np.arange(1, 17), 0.5, np.full(16, 0.3))
    assert compiled_programs(generate_module._generate) == compiled


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, r"temperature: expected a finite number of at least 0, got -1"),
        ({"temperature": float("nan")}, r"temperature: expected .*, got nan"),
        ({"temperature": "hot"}, r"temperature: expected .*, got 'hot'"),
        ({"temperature": [1.0, 2.0, 3.0]}, r"temperature: expected .*, or one for each of 2 rows, got \[1\.0"),
        ({"top_k": 0}, r"top_k: expected an int of at least 1, got 0"),
        ({"top_k": 1.5}, r"top_k: expected an int of at least 1.*, got 1\.5"),
        ({"top_p": 0}, r"top_p: expected a number above 0, at most 1, got 0"),
        ({"top_p": [0.5, 1.5]}, r"top_p: expected .*, got \[0\.5, 1\.5\]"),
        ({"min_p": 2}, r"min_p: expected a number in 0\.\.1, got 2"),
        ({"key": 3}, r"key: expected a PRNG key, such as jax\.random\.key\(0\), .* got 3"),
        ({"key": np.zeros(3, np.uint32)}, r"key: expected a PRNG key"),
        ({"key": None, "top_p": 0.5}, r"key: expected a PRNG key, .* to sample with top_p; got None"),
        ({"greedy_drafts": 1}, r"greedy_drafts: expected True or False, got 1"),
    ],
)
def test_bad_values_are_one_clear_error(options, message):
    params, tokens = case(4, 0.15).params, np.zeros((2, 3), np.int32)
    options = {"key": jax.random.key(0), **options}
    for call in (lsjax.generate, lsjax.prefill):
        with pytest.raises(ValueError, match=message):
            call(params, tokens, **options)
    assert CONFIG.vocab_size == params.config.vocab_size


def test_more_than_the_vocabulary_is_no_cut():
    logits = np.random.default_rng(0).normal(size=(2, 9)).astype(np.float32)
    np.testing.assert_array_equal(filtered(logits, top_k=10**12), logits)
