"""What is compiled: which weights a program reads, what it copies, how often each layer runs, where it lowers."""

import collections
import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import CONFIG
from support import compiled_programs, counted_compilations, random_params, temporaries_of

import lsjax
from lsjax import processors
from lsjax.decode import generate as generate_module
from lsjax.decode.prefill import start
from lsjax.decode.request import Request
from lsjax.decode.round import run_round
from lsjax.decode.state import Plan

AUTOREGRESSIVE, SPECULATIVE = Plan(4, 4, 0), Plan(2, 4, 4)


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, seed=0)


def arguments(params, batch: int, plan: Plan, capacity: int, width: int = 8) -> tuple:
    """Of the jitted cores of ``generate`` and ``prefill``."""
    tokens, lengths = np.ones((batch, width), np.int32), np.full(batch, width, np.int32)
    eos, pad = np.full((batch, 4), -1, np.int32), np.zeros(batch, np.int32)
    return params, Request(tokens, lengths, lengths + 8, eos, pad), plan, capacity


def fresh_state(params, batch: int, plan: Plan, capacity: int):
    return start(*arguments(params, batch, plan, capacity))


def test_draft_reads_the_weights_of_its_layers_alone(params):
    deep = dataclasses.replace(CONFIG, num_hidden_layers=6)
    model = random_params(deep, seed=0)
    state = fresh_state(model, 2, Plan(4, 6, 3), 64)
    text = lsjax.draft.lower(model, state, num_layers=4).as_text(debug_info=True)
    read = {path for path in flatten_names(model) if f"params.tree{path}" in text}
    expected = {path for path in flatten_names(model) if not any(f"layers_{layer}'" in path for layer in (4, 5))}
    assert read == expected
    assert len(read) == 4 * 9 + 3
    caches = [f"state.cache[{layer}]" in text for layer in range(6)]
    assert caches == [True] * 4 + [False] * 2


def flatten_names(params) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params.tree)]


def test_each_depth_of_draft_is_a_program_of_its_own(params):
    state = fresh_state(params, 2, Plan(3, 4, 3), 64)
    before = compiled_programs(lsjax.draft)
    lsjax.draft(params, state, num_layers=1)
    lsjax.draft(params, state, num_layers=2)
    assert compiled_programs(lsjax.draft) == before + 2
    lsjax.draft(params, state, num_layers=2)
    assert compiled_programs(lsjax.draft) == before + 2


def test_draft_and_verify_called_alone_are_the_round(params):
    state = fresh_state(params, 2, SPECULATIVE, 64)
    drafted = lsjax.draft(params, state)
    after = run_round(params, state)
    assert drafted.tokens.shape == (2, 4)
    assert drafted.hidden.shape == (2, 5, CONFIG.hidden_size)
    targets = lsjax.verify(params, state, drafted).targets
    accepted = np.cumprod(np.asarray(drafted.tokens == targets[:, :4]), axis=1).sum(axis=1)
    np.testing.assert_array_equal(after.stats.accepted, accepted)
    # Another exit than the state's own: the drafts differ, the verdict is still the full model's.
    other = lsjax.draft(params, state, num_layers=1)
    first = lsjax.verify(params, state, other).targets[:, 0]
    np.testing.assert_array_equal(first, targets[:, 0])


def cache_bytes(batch: int, slots: int) -> int:
    return 4 * 2 * batch * CONFIG.num_key_value_heads * slots * CONFIG.head_dim * 4


def copying_round(params, state):
    """The negative control: a frozen row's cache kept by ``where``."""
    after = run_round(params, state)
    done = state.done[:, None, None, None]
    cache = jax.tree.map(lambda old, new: jnp.where(done, old, new), state.cache, after.cache)
    return after.replace(cache=cache)


def loop_temporaries(params, batch: int, plan: Plan, capacity: int, round_function) -> int:
    """Bytes of temporary memory of the compiled loop over rounds, its state donated."""
    state = jax.eval_shape(functools.partial(fresh_state, batch=batch, plan=plan, capacity=capacity), params)

    def loop(params, state):
        return jax.lax.while_loop(lambda s: s.active, functools.partial(round_function, params), state)

    compiled = jax.jit(loop, donate_argnums=1).lower(params, state).compile()
    return temporaries_of(compiled)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("plan", [AUTOREGRESSIVE, SPECULATIVE])
def test_the_loop_copies_no_cache(params, batch, plan):
    small, large = (loop_temporaries(params, batch, plan, capacity, run_round) for capacity in (512, 8192))
    assert large - small < 0.1 * cache_bytes(batch, 8192)


def test_a_copied_cache_is_noticed(params):
    small, large = (loop_temporaries(params, 3, SPECULATIVE, capacity, copying_round) for capacity in (512, 8192))
    assert large - small >= cache_bytes(3, 8192 - 512)


@pytest.mark.parametrize("plan", [AUTOREGRESSIVE, SPECULATIVE])
def test_generate_holds_one_cache_and_its_program_copies_none(params, plan):
    text, temporaries = {}, {}
    for capacity in (512, 8192):
        compiled = generate_module._generate.lower(*arguments(params, 3, plan, capacity)).compile()
        temporaries[capacity] = temporaries_of(compiled)
        text[capacity] = compiled.as_text()
    assert temporaries[8192] - temporaries[512] < 1.1 * cache_bytes(3, 8192 - 512)
    slots = 8192 + plan.num_speculations + 1
    shape = f"f32[3,{CONFIG.num_key_value_heads},{slots},{CONFIG.head_dim}]"
    assert shape in text[8192]
    assert not [line for line in text[8192].splitlines() if f"= {shape}" in line and " copy(" in line]


def test_decode_round_donates_the_cache_and_keeps_shared_states(params):
    state = fresh_state(params, 2, SPECULATIVE, 64)
    after = lsjax.decode_round(params, state)
    assert state.cache[0].key.is_deleted()
    assert not state.tokens.is_deleted()
    assert not after.cache[0].key.is_deleted()


class Counter:
    """Counts at run time: how often each layer and the head ran, and on how many positions."""

    def __init__(self) -> None:
        self.runs = collections.Counter()

    def __call__(self, next_method, args, kwargs, context):
        name, method = context.module.name, context.method_name
        if (name or "").startswith("layers_") and method == "__call__":
            self.record(name, args[0].shape[1])
        if name is None and method == "logits":
            self.record("head", int(np.prod(args[0].shape[1:-1])))
        return next_method(*args, **kwargs)

    def record(self, name: str, positions: int) -> None:
        def count() -> None:
            self.runs[name, positions] += 1

        jax.debug.callback(count)


def counted(function, *args, **kwargs):
    """The result, and what ran; traced anew, since the counting is part of the trace."""
    counter = Counter()
    jax.clear_caches()
    try:
        with nn.intercept_methods(counter):
            result = jax.block_until_ready(function(*args, **kwargs))
            jax.effects_barrier()
    finally:
        jax.clear_caches()
    return result, counter.runs


def test_no_work_is_repeated(params):
    prompt = np.arange(1, 9)[None]
    plan = Plan(2, 4, 3)
    state, runs = counted(fresh_state, params, 1, plan, 64)
    assert runs == {(f"layers_{layer}", 7): 1 for layer in range(4)}  # the eighth token waits for the first round
    _, runs = counted(lsjax.decode_round, params, state)
    early = {(f"layers_{layer}", 1): 3 + 1 for layer in range(2)}
    deep = {(f"layers_{layer}", 3 + 1): 1 for layer in range(2, 4)}
    heads = {("head", 1): 3, ("head", 4): 1}
    assert runs == {**early, **deep, **heads}

    # Every position of the prompt goes through each layer once, the last one in the first round; the head runs on the
    # last one alone. (In the caller's jit the shapes are exact; eager calls add padding.)
    generate = jax.jit(functools.partial(lsjax.generate, max_new_tokens=1, eos_token_id=()))
    out, runs = counted(generate, params, prompt)
    assert runs == {(f"layers_{layer}", width): 1 for layer in range(4) for width in (7, 1)} | {("head", 1): 1}
    assert out.stats.rounds == 1

    # No draft is made that no row can use: one new token needs none, two need one.
    for limit in (1, 2):
        options = {"exit_layer": 2, "num_speculations": 3, "max_new_tokens": limit, "eos_token_id": (), "capacity": 12}
        out, runs = counted(lsjax.generate, params, prompt, **options)
        rounds = int(out.stats.rounds[0])
        assert runs["head", 1] == limit - 1
        assert runs["layers_0", 1] == limit - 1 + rounds
        assert runs["layers_2", 4] == rounds


def test_eager_calls_of_many_lengths_compile_little(params):
    config = dataclasses.replace(CONFIG, rms_norm_eps=2e-6)  # programs of this test's own
    model = lsjax.Params(config, params.tree)
    rng = np.random.default_rng(0)
    with counted_compilations() as compiled:
        for length in range(5, 21):
            new = int(rng.integers(5, 21))
            tokens = rng.integers(0, CONFIG.vocab_size, (2, length))
            eos = tuple(rng.integers(0, CONFIG.vocab_size, rng.integers(0, 4)).tolist())
            out = lsjax.generate(model, tokens, exit_layer=2, max_new_tokens=new, eos_token_id=eos, pad_token_id=length)
            assert out.tokens.shape == (2, length + new)
    assert 1 <= len(compiled) <= 4


def test_other_values_of_any_option_compile_nothing(params):
    def run(seed: int, **more):
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, CONFIG.vocab_size, 2 + seed % 3)
        return lsjax.generate(
            params,
            rng.integers(0, CONFIG.vocab_size, (2, 9 + seed)),
            exit_layer=2,
            max_new_tokens=20 + seed,
            eos_token_id=tuple(ids.tolist()),
            pad_token_id=seed,
            key=jax.random.key(seed),
            temperature=[0.0, 1.0, 1.5][seed % 3],
            top_k=3 + seed,
            top_p=rng.uniform(0.5, 1),
            min_p=rng.uniform(0, 0.5, 2) if seed % 2 else 0.1,
            processors=[
                processors.RepetitionPenalty(1 + seed),
                processors.PresencePenalty([0.1 * seed, 0.5]) if seed % 2 else processors.PresencePenalty(0.4),
                processors.LogitBias(ids, rng.normal(size=len(ids))),
                processors.ForbiddenIds(ids[:2]),
                processors.MinNewTokens(seed),
            ],
            stop_sequences=[rng.integers(0, CONFIG.vocab_size, n).tolist() for n in range(1, 2 + seed % 4)],
            confidence_threshold=rng.uniform(),
            num_speculations_schedule="heuristic",
            top_n=2,
            **more,
        )

    run(0)
    with counted_compilations() as compiled:
        for seed in range(1, 7):
            run(seed)
    assert compiled == []
    with counted_compilations() as compiled:  # and it does count
        run(0, process_drafts=False)
    assert compiled


def lowered_for_cuda(function, *args, **kwargs) -> str:
    traced = function.trace(*args, **kwargs)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_programs_lower_for_cuda(params):
    state = fresh_state(params, 2, SPECULATIVE, 300)
    drafted = lsjax.draft(params, state)
    programs = {
        "prefill": lowered_for_cuda(start, *arguments(params, 2, SPECULATIVE, 300)),
        "draft": lowered_for_cuda(lsjax.draft, params, state, num_layers=2),
        "verify": lowered_for_cuda(lsjax.verify, params, state, drafted),
        "generate": lowered_for_cuda(generate_module._generate, *arguments(params, 2, SPECULATIVE, 300)),
    }
    for name, text in programs.items():
        assert "stablehlo.dot_general" in text, name
        assert "custom_call" not in text, name  # nothing that only one platform has
    assert "stablehlo.while" in programs["generate"]
