"""The loop: every path for twenty steps, interruptions, checkpoints, the log, and more than one device."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import assert_same_arrays
from training import DroppingLlama

import lsjax
from lsjax.params import flatten
from lsjax.training import (
    Document,
    EarlyExitLoss,
    LayerDropout,
    Optimizer,
    Recipe,
    TrainingDiverged,
    TrainingStopped,
    Watch,
    evaluate,
    forget_training,
    load_trained,
    loop,
    measure_drafts,
    pack,
    read_log,
    take_prompts,
    train,
)
from lsjax.training.checkpoint import Checkpoints
from lsjax.training.recipe import compiler_options, init_state, train_step

CONFIG = lsjax.LlamaConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    max_position_embeddings=64,
    initializer_range=0.1,
)
OPTIMIZER = Optimizer(learning_rate=0.02, warmup_steps=2)
RECIPE = Recipe(
    steps=20,
    batch_size=8,
    loss_chunk=8,
    optimizer=OPTIMIZER,
    layer_dropout=LayerDropout(rate=0.2),
    early_exit=EarlyExitLoss(scale=1.0, curriculum="rotational", period=2),
)
WATCH = Watch(log_every=1, every=10, rows=6)


def counting(documents: int, seed: int) -> list[Document]:
    """Texts in which each token is the one before it and a step, 1 or 2 the whole text long: soon learned."""
    rng = np.random.default_rng(seed)
    lengths, starts, steps = (rng.integers(low, high, documents) for low, high in ((12, 30), (0, 32), (1, 3)))
    return [
        Document(((start + step * np.arange(length)) % 32).astype(np.int32))
        for length, start, step in zip(lengths, starts, steps, strict=True)
    ]


ROWS, HELD_OUT = pack(counting(60, 0), 16), pack(counting(12, 1), 16)


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Slower code in less time: the programs are tiny."""

    @functools.cache
    def compiled(recipe, replicated):
        quick = compiler_options(recipe) | {"xla_backend_optimization_level": 0}
        step = functools.partial(train_step, recipe)
        return jax.jit(step, donate_argnums=0, out_shardings=replicated, compiler_options=quick)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_compiled_step", compiled)
        yield


@functools.cache
def start() -> lsjax.Params:
    return lsjax.init(CONFIG, jax.random.key(0))


def run(directory, recipe=RECIPE, watch=WATCH, rows=ROWS, **options):
    return train(recipe, start(), rows, HELD_OUT, directory, watch=watch, progress=False, plots=False, **options)


def logged(directory, kind, *names):
    return [tuple(entry[name] for name in ("step", *names)) for entry in read_log(directory) if entry["kind"] == kind]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "whole"
    return directory, run(directory)


PATHS = {
    "plain": {"layer_dropout": None, "early_exit": None},
    "gradual, accumulated": {
        "accumulation": 2,
        "layer_dropout": LayerDropout(rate=0.2, depth="sigmoid", time="exponential"),
        "early_exit": EarlyExitLoss(curriculum="gradual"),
    },
    "all exits, bfloat16, rematerialised, whole rows": {
        "dtype": "bfloat16",
        "remat": True,
        "loss_chunk": 0,
        "early_exit": EarlyExitLoss(scale=0.2, curriculum="all"),
    },
    "embeddings frozen": {"optimizer": dataclasses.replace(OPTIMIZER, frozen=("embed_tokens",))},
}


@pytest.mark.parametrize("path", PATHS)
def test_twenty_steps_of_every_path(tmp_path, path):
    done = run(tmp_path, dataclasses.replace(RECIPE, **PATHS[path]), devices=jax.devices()[:1])
    losses = [last for _, last in logged(tmp_path, "step", "last_loss")]
    assert len(losses) == 20
    assert losses[0] > 3.2  # ln 32 is 3.47
    assert np.mean(losses[-3:]) < losses[0] - 0.7
    assert done.held_out.losses[-1] < 3
    assert {leaf.dtype for leaf in jax.tree.leaves(done.params)} == {np.dtype("float32")}
    frozen = bool((done.params.tree["embed_tokens"]["embedding"] == start().tree["embed_tokens"]["embedding"]).all())
    assert frozen == (path == "embeddings frozen")


def test_what_a_training_leaves(uninterrupted):
    directory, done = uninterrupted
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoints", "log.jsonl", "run.json"]
    steps = logged(directory, "step", "loss", "last_loss", "grad_norm", "learning_rate", "labels")
    assert [entry[0] for entry in steps] == list(range(1, 21))
    assert {entry[5] for entry in steps} <= set(range(100, 129))
    looks = logged(directory, "held_out", "losses", "agreement", "labels")
    assert [entry[0] for entry in looks] == [10, 20]
    assert looks[1][1] == done.held_out.losses.tolist()
    assert looks[1][2][-1] == 1
    about = json.loads((directory / "run.json").read_text())
    assert about["recipe"]["early_exit"] == {"scale": 1.0, "curriculum": "rotational", "period": 2}
    assert about["data"]["rows"] == len(ROWS)
    assert_same_arrays(load_trained(directory, "last"), done.params)
    assert start().tree["norm"]["scale"].sum() == 16  # what it started from is still there, and as it was


def test_an_early_exit_loss_teaches_the_early_layers(uninterrupted, tmp_path):
    _, with_exits = uninterrupted
    without = run(tmp_path, dataclasses.replace(RECIPE, early_exit=None, layer_dropout=None))
    assert with_exits.held_out.losses[1] < without.held_out.losses[1] - 0.1


@pytest.mark.parametrize("after", [1, 7, 10, 19])
def test_going_on_gives_the_same_numbers_to_the_last_bit(uninterrupted, tmp_path, after):
    directory, expected = uninterrupted
    asked = itertools.count(1)
    with pytest.raises(TrainingStopped, match=f"stopped after step {after} of 20"):
        run(tmp_path, should_stop=lambda: next(asked) == after)
    found = run(tmp_path, resume=True)
    for kind, names in (("step", ("loss", "last_loss", "grad_norm")), ("held_out", ("losses", "agreement"))):
        assert logged(tmp_path, kind, *names) == logged(directory, kind, *names)
    assert_same_arrays(found.params, expected.params)
    assert found.best_step == expected.best_step


def test_lines_after_the_checkpoint_and_torn_ones_are_forgotten(uninterrupted, tmp_path):
    directory, _ = uninterrupted
    asked = itertools.count(1)
    with pytest.raises(TrainingStopped):
        run(tmp_path, should_stop=lambda: next(asked) == 5)
    with (tmp_path / "log.jsonl").open("a") as log:  # as a kill after two more steps leaves it
        log.write('{"kind": "step", "step": 6, "loss": 1.0}\n{"kind": "step", "st')
    run(tmp_path)
    assert logged(tmp_path, "step", "loss") == logged(directory, "step", "loss")


def test_a_finished_training_is_not_repeated(uninterrupted):
    directory, expected = uninterrupted
    before = (directory / "log.jsonl").read_text()
    again = run(directory)
    assert_same_arrays(again.params, expected.params)
    np.testing.assert_array_equal(again.held_out.losses, expected.held_out.losses)
    assert (directory / "log.jsonl").read_text() == before


def test_another_training_does_not_go_on(uninterrupted):
    directory, _ = uninterrupted
    changed = dataclasses.replace(RECIPE, seed=1, optimizer=dataclasses.replace(OPTIMIZER, learning_rate=0.5))
    with pytest.raises(ValueError, match=r"recipe.seed: 0, now 1\nrecipe.optimizer.learning_rate: 0.02, now 0.5"):
        run(directory, changed)
    with pytest.raises(ValueError, match=r"data.rows: \d+, now \d+"):
        run(directory, rows=pack(counting(50, 0), 16))
    with pytest.raises(FileExistsError, match="holds a training of 20 steps"):
        run(directory, resume=False)


def test_there_must_be_something_to_go_on_from(tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a training with a checkpoint to go on from, found none"):
        run(tmp_path / "nothing", resume=True)
    with pytest.raises(FileNotFoundError, match=r"expected the directory of a training, found no run.json"):
        load_trained(tmp_path / "nothing")


def test_no_number_any_more_stops_the_training(tmp_path):
    recipe = dataclasses.replace(
        RECIPE, optimizer=Optimizer(learning_rate=1e30, schedule="constant", clip_norm=0), early_exit=None
    )
    with pytest.raises(TrainingDiverged, match=r"step \d+ of 20: the loss is .*; stopped, there is no checkpoint yet"):
        run(tmp_path, recipe)
    assert all(math.isfinite(loss) for _, loss in logged(tmp_path, "step", "loss"))
    with pytest.raises(FileNotFoundError, match="found none yet"):
        load_trained(tmp_path)


def test_the_best_and_the_last_checkpoint_are_kept(tmp_path):
    state = init_state(RECIPE, start())
    with Checkpoints(tmp_path) as kept:
        assert kept.last_step is None
        for step, loss in enumerate([3.0, 2.0, math.inf, 4.0, 2.5], start=1):
            kept.save(state.replace(step=jnp.int32(step)), loss)
        assert (kept.best_step, kept.last_step) == (2, 5)
        assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2", "5"]
    with Checkpoints(tmp_path) as kept:
        assert (kept.best_step, kept.last_step) == (2, 5)
        kept.save(state.replace(step=jnp.int32(6)), 1.0)
        assert (kept.best_step, kept.last_step) == (6, 6)
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["6"]


def test_a_checkpoint_that_a_kill_left_half_written_is_passed_over(uninterrupted, tmp_path):
    _, expected = uninterrupted
    asked = itertools.count(1)
    with pytest.raises(TrainingStopped):
        run(tmp_path, should_stop=lambda: next(asked) == 5)
    half = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp-1234"
    (half / "params").mkdir(parents=True)
    found = run(tmp_path)
    assert not half.exists()
    assert_same_arrays(found.params, expected.params)


def test_two_devices_compute_what_one_does(uninterrupted, tmp_path):
    assert len(jax.devices()) == 2
    directory, _ = uninterrupted
    one = tmp_path / "one"
    run(one, dataclasses.replace(RECIPE), devices=jax.devices()[:1])
    losses = [np.array(logged(where, "step", "loss"))[:, 1] for where in (directory, one)]
    np.testing.assert_allclose(losses[0][:5], losses[1][:5], rtol=1e-4)
    with pytest.raises(ValueError, match="batch_size: expected rows that 2 devices share evenly, got 6 in 2 parts"):
        run(tmp_path, dataclasses.replace(RECIPE, batch_size=6, accumulation=2))


def test_evaluation_is_every_layer_on_every_row_without_dropout():
    batch = HELD_OUT.take([0, 3, 1])
    params = jax.tree.map(lambda leaf: leaf * 3, start())
    oracle = DroppingLlama(params)
    found = evaluate(params, [HELD_OUT.take([row]) for row in (0, 3, 1)], chunk=5)
    np.testing.assert_allclose(found.losses, oracle.losses(batch), rtol=1e-5)
    choices = oracle.exits(batch).argmax(-1)
    valid = batch.labels >= 0
    agreement = [(layer == choices[-1])[valid].mean() for layer in choices]
    np.testing.assert_allclose(found.agreement, agreement)
    assert found.labels == valid.sum()


def test_a_batch_of_held_out_rows_is_filled_up_with_nothing(tmp_path):
    """Six rows for batches of four, as one device and as two: each counts once."""
    recipe = dataclasses.replace(RECIPE, steps=1, batch_size=4)
    done = run(tmp_path, recipe, Watch(rows=6))
    chosen = np.linspace(0, len(HELD_OUT) - 1, 6).round().astype(int)
    alone = evaluate(done.params, [HELD_OUT.take(chosen)])
    assert done.held_out.labels == alone.labels
    np.testing.assert_allclose(done.held_out.losses, alone.losses, rtol=1e-5)


def test_drafts_are_those_of_real_decoding(tmp_path):
    prompts = take_prompts(counting(12, 1), 5, 8, seed=0)
    watch = Watch(every=10, drafts_every=10, exits=(1, 2), num_speculations=3, max_new_tokens=12)
    told = []
    done = run(tmp_path, watch=watch, prompts=prompts, tell=told.append)
    again = measure_drafts(done.params, prompts, exits=(1, 2), num_speculations=3, max_new_tokens=12)
    assert done.drafts == again
    padded = np.zeros((5, 8), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = [len(prompt) for prompt in prompts]
    out = lsjax.generate(
        done.params,
        padded,
        prompt_lengths=lengths,
        exit_layer=2,
        num_speculations=3,
        max_new_tokens=12,
        eos_token_id=(),
    )
    stats = jax.tree.map(np.sum, out.stats)
    found = done.drafts[1]
    assert found.acceptance_rate == stats.accepted / stats.drafted
    assert found.tokens_per_round == stats.new_tokens / stats.rounds
    assert found.new_tokens == 60
    drafts = logged(tmp_path, "drafts", "exit_layer", "acceptance_rate", "tokens_per_round")
    assert [entry[:2] for entry in drafts] == [(10, 1), (10, 2), (20, 1), (20, 2)]
    assert drafts[-1][2:] == (found.acceptance_rate, found.tokens_per_round)
    assert told[-1].startswith("step 20: held-out loss ")
    assert f"exit 2: {found.acceptance_rate:.1%} of the drafts accepted" in told[-1]
    with pytest.raises(ValueError, match=r"exits: expected a layer in 1\.\.3, got 4"):
        run(tmp_path / "x", watch=Watch(exits=(4,)), prompts=prompts)
    with pytest.raises(ValueError, match="prompts: expected held-out prompts"):
        run(tmp_path / "x", watch=watch)


def test_data_must_fit_the_model(tmp_path):
    with pytest.raises(ValueError, match=r"tokens: expected ids in 0..31, got 40"):
        run(tmp_path, rows=pack([Document(np.full(40, 40, np.int32))], 16))
    with pytest.raises(ValueError, match="held_out: expected rows of 17 tokens, as those to train on"):
        run(tmp_path, rows=pack(counting(20, 0), 17))
    long = pack(counting(60, 0), 65)
    with pytest.raises(ValueError, match="rows: expected at most the model's 64 positions, got 65"):
        train(RECIPE, start(), long, long, tmp_path, progress=False)
    with pytest.raises(ValueError, match="drafts_every: expected a multiple of every = 10, got 15"):
        Watch(every=10, drafts_every=15)


def test_pictures_and_forgetting(tmp_path):
    pytest.importorskip("matplotlib")
    prompts = take_prompts(counting(12, 1), 2, 8, seed=0)
    watch = Watch(every=10, exits=(1,), max_new_tokens=8)
    train(RECIPE, start(), ROWS, HELD_OUT, tmp_path, prompts=prompts, watch=watch, progress=False)
    for name in ("loss", "agreement", "drafts"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "mine.txt").write_text("kept")
    forget_training(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    forget_training(tmp_path)


@pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="draws")
def test_what_the_pictures_show():
    from lsjax.training.plot import draw_agreement, draw_drafts, draw_loss

    entries = [
        {"kind": "step", "step": 1, "loss": 3.0, "last_loss": 2.5},
        {"kind": "step", "step": 2, "loss": 2.0, "last_loss": 1.5},
        {"kind": "held_out", "step": 2, "losses": [2.5, None, 1.0], "agreement": [0.25, 0.5, 1.0]},
        {"kind": "drafts", "step": 2, "exit_layer": 1, "acceptance_rate": 0.5, "tokens_per_round": 1.5},
    ]
    loss, agreement, drafts = (draw(entries) for draw in (draw_loss, draw_agreement, draw_drafts))
    assert loss is not None
    assert agreement is not None
    assert drafts is not None

    def lines(axes):
        return [np.asarray(line.get_ydata()).tolist() for line in axes.lines]

    assert lines(loss.axes[0])[:3] == [[3.0, 2.0], [2.5, 1.5], [2.5]]
    assert len(lines(loss.axes[0])) == 5
    assert lines(agreement.axes[0]) == [[25, 50, 100]]
    assert [lines(axes) for axes in drafts.axes] == [[[50]], [[1.5]]]
    assert draw_loss([]) is draw_agreement([]) is draw_drafts([]) is None


def test_a_trained_model_is_a_model(uninterrupted, tmp_path):
    _, done = uninterrupted
    lsjax.save(done.params, tmp_path / "hf", to="hf")
    loaded = lsjax.load(tmp_path / "hf")
    assert flatten(loaded.tree).keys() == flatten(start().tree).keys()
    assert_same_arrays(loaded, done.params)
