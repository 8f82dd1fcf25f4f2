"""The command line: what it prints where, with which exit status, on a small model in a directory."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import numpy as np
import pytest
from checkpoints import write_byte_tokenizer
from support import random_params

import lsjax.cli
import lsjax.io
from lsjax.cli import comparison, generate, session
from lsjax.convert.cast import check_dtype
from lsjax.decode import generate as decoding
from lsjax.decode import request
from lsjax.measure.timing import time_in_turns
from lsjax.text.tokenizer import load_tokenizer

LAYERS = 4
LIMIT = 12
CHAT = "{% for turn in messages %}<s>{{ turn.role }}: {{ turn.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama whose deep layers add little, and a tokenizer of bytes with a chat template."""
    directory = tmp_path_factory.mktemp("models") / "small"
    config = lsjax.LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=256,
        eos_token_id=(257,),
    )
    lsjax.io.save(random_params(config, seed=0, deep_from=2, deep_scale=0.3), directory)
    write_byte_tokenizer(directory, chat_template=CHAT)
    return str(directory)


@pytest.fixture
def lsjax_generate(model, capsys):
    """Calls ``lsjax generate`` on the small model: exit status, standard output, lines of standard error."""

    def call(*arguments: str, source: str = model) -> tuple[int, str, list[str]]:
        status = lsjax.cli.main(["generate", "--model", source, "--max-new-tokens", str(LIMIT), *arguments])
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return call


def expected(model: str, text: str, **options) -> tuple[list[int], str]:
    """New tokens and their text by the library."""
    params, tokenizer = lsjax.io.load(model), load_tokenizer(model)
    tokens = tokenizer(text)["input_ids"]
    out = decoding.generate(params, tokens, max_new_tokens=LIMIT, **options)
    new = np.asarray(out.tokens)[len(tokens) : int(out.lengths)].tolist()
    return new, str(tokenizer.decode(new, skip_special_tokens=True))


# Without a model.


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["generate", "--help"],
        ["convert", "--help"],
        ["inspect", "--help"],
        ["bench", "--help"],
        ["chat", "--help"],
        ["chat", "--model", "m", "--strategy", "early_exit"],
        ["bench", "--model", "m", "--early-exit"],
        ["generate", "--exit-layer", "0"],
    ],
)
def test_help_and_wrong_usage_import_neither_jax_nor_transformers(arguments):
    # The package's front door is the library's own affair: here an empty one stands in for it.
    code = f"""
import importlib.util, sys, types
package = types.ModuleType("lsjax")
package.__path__ = importlib.util.find_spec("lsjax").submodule_search_locations
sys.modules["lsjax"] = package
from lsjax.cli import main
try:
    main({arguments})
except SystemExit as exit:
    assert exit.code == 0
assert not {{"jax", "numpy", "transformers"}} & set(sys.modules), "imported too much"
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr
    assert (f"lsjax {arguments[0]}" if len(arguments) > 1 else "generate") in result.stdout + result.stderr


def test_version_as_a_module():
    result = subprocess.run(
        [sys.executable, "-m", "lsjax", "--version"], capture_output=True, text=True, check=False, timeout=120
    )
    assert (result.returncode, result.stdout) == (0, f"lsjax {version('lsjax')}\n"), result.stderr


def test_help_lists_every_option(capsys):
    with pytest.raises(SystemExit) as exit_:
        lsjax.cli.main(["generate", "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    options = "--model --prompt --prompt-file --exit-layer --num-speculations --max-new-tokens --strategy --compare"
    options += " --temperature --top-k --top-p --min-p --seed --stop --stream"
    for option in f"{options} --repetitions --chat --dtype --json".split():
        assert f"\n  {option}" in text
    assert "examples:\n  lsjax generate --model demo" in text


def test_names_are_the_library_s():
    assert set(generate.STRATEGIES) == set(request.STRATEGIES)
    assert [str(check_dtype(name)) for name in generate.DTYPES] == list(generate.DTYPES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: command"),
        (["translate"], "invalid choice: 'translate'"),
        (["generate", "--prompt", "a"], "required: --model"),
        (["generate", "--model", "m"], "expected a prompt"),
        (["generate", "--model", "m", "--prompt", ""], "got an empty text"),
        (["generate", "--model", "m", "--prompt-file", "no such file"], "'no such file'"),
        (["generate", "--model", "m", "--prompt", "a", "--strategy", "magic"], "invalid choice: 'magic'"),
        (["generate", "--model", "m", "--prompt", "a", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["generate", "--model", "m", "--prompt", "a", "--exit-layer", "0"], "at least 1, got '0'"),
        (["generate", "--model", "m", "--prompt", "a", "--exit-layer", "two"], "at least 1, got 'two'"),
        (["generate", "--model", "m", "--prompt", "a", "--num-speculations", "-1"], "at least 0, got '-1'"),
        (["generate", "--model", "m", "--prompt", "a", "--max-new-tokens", "0"], "at least 1, got '0'"),
        (["generate", "--model", "m", "--prompt", "a", "--compare"], "--compare needs --exit-layer"),
        (["generate", "--model", "m", "--prompt", "a", "--strategy", "early_exit"], "early_exit needs --exit-layer"),
        (["generate", "--model", "m", "--prompt", "a", "--num-speculations", "2"], "needs --exit-layer"),
        (["generate", "--model", "m", "--prompt", "a", "--repetitions", "2"], "is for --compare"),
        (
            ["generate", "--model=m", "--prompt=a", "--exit-layer=1", "--compare", "--strategy=early_exit"],
            "leave --strategy out",
        ),
        (["generate", "--model=m", "--prompt=a", "--temperature=-1"], "expected a number of at least 0, got '-1'"),
        (["generate", "--model=m", "--prompt=a", "--temperature=inf"], "expected a number of at least 0, got 'inf'"),
        (["generate", "--model=m", "--prompt=a", "--top-k=0"], "at least 1, got '0'"),
        (["generate", "--model=m", "--prompt=a", "--top-p=0"], "expected a number above 0, at most 1, got '0'"),
        (["generate", "--model=m", "--prompt=a", "--min-p=x"], "expected a number in 0..1, got 'x'"),
        (["generate", "--model=m", "--prompt=a", "--seed=-1"], "at least 0, got '-1'"),
        (["generate", "--model=m", "--prompt=a", "--stream", "--json"], "leave --json out"),
        (["generate", "--model=m", "--prompt=a", "--stream", "--exit-layer=1", "--compare"], "leave --compare out"),
        (
            ["generate", "--model=m", "--prompt=a", "--exit-layer=1", "--compare", "--top-k=5", "--stop=b"],
            "--compare is for whole greedy texts: leave --top-k, --stop out",
        ),
        (["generate", "--model", "m", "--prompt", "a", "--sing"], "unrecognized arguments: --sing"),
        (["generate", "--model", "m", "--prom", "a"], "unrecognized arguments: --prom a"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments, message, capsys):
    assert lsjax.cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert err.startswith("lsjax generate: error: " if arguments[:1] == ["generate"] else "lsjax: error: ")
    assert message in err


def test_long_errors_are_cut_to_one_line():
    error = lsjax.cli.UsageError("broken:\n" + "\n".join(f"  missing: tensor {index}" for index in range(40)))
    assert str(error) == "broken: " + "; ".join(f"missing: tensor {index}" for index in range(5)) + "; and 35 more"


def test_interrupt_is_quiet(monkeypatch, capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "open_session", interrupt)
    assert lsjax.cli.main(["generate", "--model", "m", "--prompt", "a"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_interrupt_while_the_compiled_program_runs(model):
    """Python's handler would wait until all the tokens are there."""
    code = f"""
import signal
import lsjax.cli
from lsjax.text import generator
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
real = generator.generate
def announced(*args, **kwargs):
    print("running", flush=True)
    return real(*args, **kwargs, eos_token_id=())
generator.generate = announced
lsjax.cli.main(["generate", "--model", {model!r}, "--prompt", "a", "--max-new-tokens", "300000"])
"""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        time.sleep(4)  # compiled by now, and far from done
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=5)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (-signal.SIGINT, "", "")


# With a model.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--exit-layer", "5"], "expected a layer in 1..4, got 5"),
        (["--chat"], "chat_template"),
    ],
)
def test_what_does_not_fit_the_model(model, arguments, message, lsjax_generate, tmp_path):
    bare = shutil.copytree(model, tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    status, out, err = lsjax_generate("--prompt", "a", *arguments, source=str(bare))
    assert (status, out, len(err)) == (2, "", 1)
    assert message in err[0]


def test_models_that_do_not_load(model, lsjax_generate, tmp_path):
    foreign = shutil.copytree(model, tmp_path / "foreign")
    (foreign / "config.json").write_text('{"model_type": "gpt2"}')
    truncated = shutil.copytree(model, tmp_path / "truncated")
    weights = truncated / "params.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    mute = shutil.copytree(model, tmp_path / "mute")
    (mute / "tokenizer.json").unlink()
    for source, message in (
        (foreign, "expected 'llama', got 'gpt2'"),
        (truncated, "params.safetensors"),
        (mute, "holds no tokenizer"),
        (tmp_path / "absent", "no such file or directory"),
    ):
        status, out, err = lsjax_generate("--prompt", "a", source=str(source))
        assert (status, out, len(err)) == (2, "", 1)
        assert err[0].startswith(f"lsjax generate: error: --model {source}: ")
        assert message in err[0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exit_layer": 2},
        {"exit_layer": 2, "num_speculations": 2},
        {"exit_layer": 1, "strategy": "early_exit"},
        {"exit_layer": 1, "strategy": "autoregressive"},
    ],
)
def test_the_text_is_the_library_s(model, options, lsjax_generate):
    flags = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    status, out, err = lsjax_generate("--prompt", "Once upon", *flags)
    new, text = expected(model, "Once upon", **options)
    assert (status, out) == (0, text + "\n")
    assert len(err) == 1
    strategy = options.get("strategy") or ("self_speculative" if options else "autoregressive")
    assert err[0].startswith(f"{strategy}: {len(new)} new tokens in ")
    assert ("drafts accepted" in err[0]) == (strategy == "self_speculative")


def test_json_is_all_of_stdout(model, lsjax_generate):
    status, out, err = lsjax_generate("--prompt", "Once", "--prompt", "upon a time", "--exit-layer", "2", "--json")
    assert (status, err, out.count("\n")) == (0, [], 1)
    report = json.loads(out)
    assert report["strategy"] == "self_speculative"
    assert (report["exit_layer"], report["num_layers"], report["num_speculations"]) == (2, LAYERS, 4)
    assert [result["prompt"] for result in report["results"]] == ["Once", "upon a time"]
    for result in report["results"]:  # a row in a batch is what it is alone
        assert (result["tokens"], result["text"]) == expected(model, result["prompt"], exit_layer=2)
        histogram = result["accept_histogram"]
        assert sum(histogram) == result["rounds"]
        assert sum(kept * count for kept, count in enumerate(histogram)) == result["accepted"]
    total = {name: sum(result[name] for result in report["results"]) for name in ("accepted", "drafted", "rounds")}
    assert report["acceptance_rate"] == total["accepted"] / total["drafted"]
    assert report["new_tokens"] == sum(len(result["tokens"]) for result in report["results"])
    assert report["tokens_per_round"] == report["new_tokens"] / total["rounds"]


def test_prompts_from_files_and_standard_input(model, lsjax_generate, monkeypatch, tmp_path):
    (tmp_path / "prompt.txt").write_text("Es war ein Bär\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin\n"))
    status, out, _ = lsjax_generate("--prompt-file", str(tmp_path / "prompt.txt"), "--prompt", "-", "--json")
    results = json.loads(out)["results"]
    assert status == 0
    assert [result["prompt"] for result in results] == ["Es war ein Bär", "from stdin"]
    assert results[0]["tokens"] == expected(model, "Es war ein Bär")[0]


def test_several_prompts_are_told_apart(model, lsjax_generate):
    _, out, _ = lsjax_generate("--prompt", "Once", "--prompt", "upon\na time")
    texts = [expected(model, prompt)[1] for prompt in ("Once", "upon\na time")]
    assert out == f"== prompt 1: Once\n{texts[0]}\n== prompt 2: upon a time\n{texts[1]}\n"


def test_chat_template(model, lsjax_generate):
    _, out, _ = lsjax_generate("--prompt", "Hi", "--chat", "--json")
    tokenizer = load_tokenizer(model)
    ids = [tokenizer.convert_tokens_to_ids("<s>"), *tokenizer("user: Hi\n", add_special_tokens=False)["input_ids"]]
    found = decoding.generate(lsjax.io.load(model), ids, max_new_tokens=LIMIT)
    assert json.loads(out)["results"][0]["tokens"] == np.asarray(found.tokens)[len(ids) : int(found.lengths)].tolist()


def test_dtype(lsjax_generate):
    _, out, _ = lsjax_generate("--prompt", "Once", "--dtype", "bfloat16", "--json")
    assert json.loads(out)["dtype"] == "bfloat16"


@pytest.mark.filterwarnings("default")
def test_warnings_are_one_line(lsjax_generate):
    status, _, err = lsjax_generate("--prompt", "Once", "--max-new-tokens", "80")
    assert status == 0
    assert err[0].startswith("lsjax generate: warning: 84 tokens")
    assert len(err) == 2


# Comparing.


def test_compare(model, lsjax_generate):
    status, out, err = lsjax_generate("--prompt", "Once upon", "--exit-layer", "2", "--compare", "--repetitions", "2")
    new, text = expected(model, "Once upon")
    assert (status, err) == (0, [])
    assert out.startswith(f"{text}\n\nBoth strategies wrote this text, identical token for token.\n")
    lines = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert lines["autoregressive"][1] == lines["self_speculative"][1] == str(len(new))
    assert lines["autoregressive"][5:] == ["-", "1.00"]
    assert lines["self_speculative"][5].endswith("%")
    assert "median of 2 warm runs" in out
    assert "rounds by accepted drafts: 0: " in out
    assert "times the speed of autoregressive decoding" in out


def test_compare_as_json(model, lsjax_generate):
    status, out, err = lsjax_generate("--prompt", "Once upon", "--exit-layer", "4", "--compare", "--json")
    assert (status, err, out.count("\n")) == (0, [], 1)
    report = json.loads(out)
    assert report["identical"] is True
    assert report["first_difference"] is None
    plain, drafted = (report["strategies"][name] for name in ("autoregressive", "self_speculative"))
    assert plain["results"][0]["tokens"] == drafted["results"][0]["tokens"] == expected(model, "Once upon")[0]
    assert (plain["acceptance_rate"], drafted["acceptance_rate"]) == (0, 1)  # the last layer drafts for itself
    assert 0.01 < report["speed_ratio"] < 100
    assert drafted["tokens_per_second"] == drafted["new_tokens"] / drafted["seconds"]


def test_compare_says_where_texts_differ(model, lsjax_generate, monkeypatch):
    real = session.generate

    def faulty(params, tokens, **options):
        out = real(params, tokens, **options)
        if options["strategy"] == "self_speculative":
            row = int(options["prompt_lengths"][1]) + 3  # the second prompt's fourth new token
            out = dataclasses.replace(out, tokens=out.tokens.at[1, row].set(65))
        return out

    monkeypatch.setattr(session, "generate", faulty)
    arguments = ("--prompt", "Once", "--prompt", "upon a time", "--exit-layer", "2", "--compare")
    status, out, _ = lsjax_generate(*arguments)
    new, _ = expected(model, "upon a time")
    assert status == 1
    assert "THE TEXTS DIFFER: first at new token 4 of prompt 2:" in out
    assert f"(id {new[3]})" in out
    assert "(id 65)" in out
    status, out, _ = lsjax_generate(*arguments, "--json")
    difference = json.loads(out)["first_difference"]
    gap = difference.pop("gap")
    assert status == 1
    ids = {"autoregressive": new[3], "self_speculative": 65}
    assert difference == {"prompt": 1, "new_token": 3, "tie": False} | ids
    tokens = load_tokenizer(model)("upon a time")["input_ids"] + new[:3]
    logits = np.asarray(lsjax.forward(lsjax.io.load(model), np.array(tokens)))[-1]
    top = np.sort(logits)
    assert gap == pytest.approx((top[-1] - top[-2]) / logits.std(), rel=1e-3)


@pytest.mark.parametrize(
    ("seconds", "accepted", "said", "unsaid"),
    [
        (0.5, 3, "ran at 2.00 times", "slower"),
        (2.0, 3, "slower because 75.0% of the drafts were accepted", "trained to exit"),
        (2.0, 1, "slower because 25.0% of the drafts were accepted", "Nothing was drafted"),
    ],
)
def test_the_verdict_is_honest(monkeypatch, lsjax_generate, seconds, accepted, said, unsaid):
    new = list(range(65, 73))
    answers = {
        "autoregressive": session.Answer("autoregressive", 0.0, [new], [8], [0], [0], [[8]]),
        "self_speculative": session.Answer("self_speculative", 0.0, [new], [4], [4], [accepted], [[0, 4]]),
    }
    on_a_clock(monkeypatch, answers, {"autoregressive": [9.0, 1.0, 1.0], "self_speculative": [9.0, seconds, seconds]})
    status, out, _ = lsjax_generate("--prompt", "a", "--exit-layer", "2", "--compare", "--repetitions", "2")
    assert status == 0
    assert said in out
    assert unsaid not in out


def on_a_clock(monkeypatch, answers, times):
    """Runs take the given times, and nothing else takes any."""
    now, left = [0.0], {strategy: iter(seconds) for strategy, seconds in times.items()}

    def answer(self, strategy):
        now[0] += next(left[strategy])
        return answers[strategy]

    monkeypatch.setattr(session.Session, "answer", answer)
    monkeypatch.setattr(comparison, "time_in_turns", functools.partial(time_in_turns, clock=lambda: now[0]))


def test_compile_time_is_told_apart(monkeypatch, lsjax_generate):
    """The median of the warm runs, one slow outlier among them; the first run's excess is compilation.

    The ratio is the median of each turn's own: both runs of the second turn met a slow moment.
    """
    times = {"autoregressive": [9.0, 1.0, 5.0, 2.0], "self_speculative": [7.0, 0.5, 4.0, 0.5]}
    answers = {name: session.Answer(name, 0.0, [[65, 66]], [2], [0], [0], [[2]]) for name in times}
    on_a_clock(monkeypatch, answers, times)
    _, out, _ = lsjax_generate("--prompt", "a", "--exit-layer", "2", "--compare", "--json")
    report = json.loads(out)
    plain, drafted = (report["strategies"][name] for name in times)
    assert (plain["seconds"], plain["compile_seconds"], plain["tokens_per_second"]) == (2.0, 7.0, 1.0)
    assert (drafted["seconds"], drafted["compile_seconds"], drafted["tokens_per_second"]) == (0.5, 6.5, 4.0)
    assert report["speed_ratio"] == 2.0


@pytest.mark.demo
def test_the_main_job_on_the_demo_model(capsys):
    prompt = "What is the capital of France?"
    arguments = ["--chat", "--exit-layer", "10", "--max-new-tokens", "24", "--repetitions", "1", "--compare"]
    assert lsjax.cli.main(["generate", "--model", "demo", "--prompt", prompt, *arguments]) == 0
    out = capsys.readouterr().out
    assert "Paris" in out.splitlines()[0]
    assert "identical token for token" in out


def test_a_reader_that_has_seen_enough(tmp_path):
    """As ``lsjax ... | head -1``: no traceback."""
    command = [sys.executable, "-m", "lsjax", "inspect", str(tmp_path)]
    read, write = os.pipe()
    os.close(read)
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (result.returncode, result.stderr) == (141, "")
