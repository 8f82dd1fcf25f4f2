"""``lsjax train``: settings in TOML, the command from data to a model, and a process that is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from checkpoints import assert_same_arrays, write_byte_tokenizer

import lsjax
import lsjax.cli
from lsjax.text.tokenizer import load_tokenizer
from lsjax.training import EarlyExitLoss, LayerDropout, read_log, read_settings

SETTINGS = """
out = "run"
tokenizer = "tokenizer"

[model]
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 64

[data]
files = ["texts/*.txt", "answers.jsonl"]
held_out = 0.2
sequence_length = 32

[recipe]
steps = 20
batch_size = 4

[recipe.optimizer]
learning_rate = 0.01
warmup_steps = 2

[recipe.layer_dropout]
rate = 0.1

[recipe.early_exit]
scale = 0.2
period = 2

[watch]
log_every = 1
every = 10
exits = [1]
prompts = 2
prompt_length = 8
max_new_tokens = 8
"""


@pytest.fixture
def home(tmp_path):
    """A directory with a tokenizer, texts, answers and settings."""
    (tmp_path / "tokenizer").mkdir()
    write_byte_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} sheep jump over the fence. " * 4)
    lines = [json.dumps({"prompt": f"{n}+1=", "completion": f"{n + 1}"}) for n in range(20)]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    (tmp_path / "train.toml").write_text(SETTINGS)
    return tmp_path


def command(home, *arguments):
    return lsjax.cli.main(["train", "--config", str(home / "train.toml"), *map(str, arguments)])


def losses(directory):
    return [(entry["step"], entry["loss"]) for entry in read_log(directory) if entry["kind"] == "step"]


def test_from_texts_to_a_model_and_from_it_to_another(home, capsys):
    assert command(home) == 0
    out = capsys.readouterr().out
    assert "documents" in out
    assert "step 20: held-out loss" in out
    assert "exit 1:" in out
    model = home / "run" / "model"
    assert out.splitlines()[-1] == f"{model}: the trained model"
    params = lsjax.load(model)
    assert params.config.vocab_size == 258  # the tokenizer's, like the special ids
    assert (params.config.bos_token_id, params.config.eos_token_id) == (256, (257,))
    assert load_tokenizer(model)("ab")["input_ids"] == load_tokenizer(home / "tokenizer")("ab")["input_ids"]
    found = losses(home / "run")
    assert [step for step, _ in found] == list(range(1, 21))
    assert found[-1][1] < found[0][1] - 0.5

    assert lsjax.cli.main(["convert", str(model), str(home / "hf"), "--to", "hf"]) == 0
    assert_same_arrays(lsjax.load(home / "hf"), params)
    generate = ["generate", "--model", str(home / "hf"), "--prompt", "3 sheep", "--exit-layer", "1"]
    capsys.readouterr()
    assert lsjax.cli.main([*generate, "--max-new-tokens", "12"]) == 0
    assert capsys.readouterr().out.strip()

    text = SETTINGS.split("[model]")[0] + "[data]" + SETTINGS.split("[data]")[1].replace('"texts/*.txt", ', "")
    text = text.replace('tokenizer = "tokenizer"', 'init = "hf"')
    text = text.replace("warmup_steps = 2", 'warmup_steps = 2\nfrozen = ["embed_tokens"]').replace("0.2\n", "0.5\n", 1)
    (home / "train.toml").write_text(text)
    assert command(home, "--out", home / "tuned") == 0
    tuned = lsjax.load(home / "tuned" / "model")
    same = jax.tree.map(lambda a, b: bool((a == b).all()), tuned.tree, params.tree)
    assert same["embed_tokens"]["embedding"]
    assert not same["lm_head"]["kernel"]
    assert losses(home / "tuned")[0][1] < found[0][1]  # it starts from what was learned


def test_calls_again(home, capsys):
    assert command(home, "--quiet") == 0
    assert capsys.readouterr().out == ""
    before = losses(home / "run")
    weights = lsjax.load(home / "run" / "model")
    assert command(home) == 0  # goes on, at its end
    assert losses(home / "run") == before
    assert_same_arrays(lsjax.load(home / "run" / "model"), weights)
    text = (home / "train.toml").read_text()
    (home / "train.toml").write_text(text.replace("learning_rate = 0.01", "learning_rate = 0.02"))
    assert command(home) == 2
    assert "recipe.optimizer.learning_rate: 0.01, now 0.02" in capsys.readouterr().err
    assert losses(home / "run") == before
    assert command(home, "--no-resume", "--quiet") == 0
    assert losses(home / "run")[:1] == before[:1]
    assert losses(home / "run")[5:] != before[5:]
    assert command(home, "--resume", "--out", home / "nothing") == 2
    assert "expected a training with a checkpoint to go on from" in capsys.readouterr().err


def test_a_loss_that_is_no_number_is_status_1(home, capsys):
    text = (home / "train.toml").read_text()
    (home / "train.toml").write_text(text.replace("learning_rate = 0.01", "learning_rate = 1e30\nclip_norm = 0"))
    assert command(home) == 1
    assert "lsjax train: step " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("steps = 20", "stps = 20"), "recipe.stps: there is no such entry; expected one of steps, batch_size"),
        (("steps = 20", ""), "recipe.steps: expected an entry, found none"),
        (("rate = 0.1", "rate = 2"), "recipe.layer_dropout.rate: expected a number in 0..1, got 2"),
        (("[watch]", "[watch.x]"), "watch.x: there is no such entry"),
        (("hidden_size = 16", "hidden_sizes = 16"), "model: expected entries of a Llama's configuration, got hidden_s"),
        (("hidden_size = 16", "hidden_size = 15"), "hidden_size"),
        (('["texts/*.txt", "answers.jsonl"]', '"texts/*.txt"'), "data.files: expected a list of paths"),
        (("answers.jsonl", "nothing.jsonl"), "files: expected a file or a pattern of files"),
        (('tokenizer = "tokenizer"', 'tokenizer = "nowhere"'), "nowhere"),
        (('out = "run"', ""), "out: expected an entry, found none"),
        (('out = "run"', 'out = "run"\ninit = "demo"'), "model: expected either init"),
        (('out = "run"', "out ="), "expected a TOML file"),
        (("sequence_length = 32", "sequence_length = 65"), "rows: expected at most the model's 64 positions, got 65"),
        (("exits = [1]", "exits = [3]"), "exits: expected a layer in 1..2, got 3"),
    ],
)
def test_wrong_settings_are_named(home, capsys, change, message):
    (home / "train.toml").write_text(SETTINGS.replace(*change))
    assert command(home) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(home.glob("run/checkpoints/*"))


def test_settings_are_this_package_s_own_classes(home):
    settings = read_settings(home / "train.toml", out=None, init=None)
    assert settings.recipe.early_exit == EarlyExitLoss(scale=0.2, period=2)
    assert settings.recipe.layer_dropout == LayerDropout(rate=0.1)
    assert (settings.recipe.optimizer.learning_rate, settings.recipe.steps, settings.watch.exits) == (0.01, 20, (1,))
    assert settings.data.files == (f"{home}/texts/*.txt", f"{home}/answers.jsonl")  # beside the file
    assert settings.out == f"{home}/run"
    assert read_settings(home / "train.toml", out="here").out == "here"
    plain = SETTINGS.split("[recipe.layer_dropout]")[0]
    (home / "train.toml").write_text(plain)
    recipe = read_settings(home / "train.toml").recipe
    assert recipe.layer_dropout is recipe.early_exit is None


@pytest.mark.slow
def test_a_process_that_is_killed_at_random_moments_loses_nothing(home):
    """Three times kill -9, wherever it is; the fourth call ends with the numbers of a run that nothing disturbed."""
    text = SETTINGS.replace("steps = 20", "steps = 60").replace("every = 10", "every = 3")
    (home / "train.toml").write_text(text.replace("exits = [1]", "exits = []"))
    call = [sys.executable, "-m", "lsjax", "train", "--quiet", "--config", str(home / "train.toml")]
    environment = os.environ | {"LSJAX_COMPILATION_CACHE": str(home / "programs"), "JAX_PLATFORMS": "cpu"}
    subprocess.run([*call, "--out", str(home / "whole")], env=environment, check=True, timeout=300)

    seed = random.randrange(2**32)
    print(f"seed of the moments: {seed}")
    moments = random.Random(seed)
    killed = home / "killed"
    for _ in range(3):
        lines = len(losses(killed)) if killed.exists() else 0
        wanted = min(lines + moments.randrange(1, 20), 59)
        process = subprocess.Popen([*call, "--out", str(killed)], env=environment)
        begin = time.monotonic()
        while process.poll() is None and not (killed.exists() and _last_step(killed) >= wanted):
            assert time.monotonic() - begin < 200
            time.sleep(0.002)
        time.sleep(moments.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    subprocess.run([*call, "--out", str(killed)], env=environment, check=True, timeout=300)
    for kind, names in (("step", ("step", "loss", "last_loss", "grad_norm")), ("held_out", ("step", "losses"))):
        whole, found = (
            [[entry[name] for name in names] for entry in read_log(directory) if entry["kind"] == kind]
            for directory in (home / "whole", killed)
        )
        assert whole == found
    assert_same_arrays(lsjax.load(killed / "model"), lsjax.load(home / "whole" / "model"))


def _last_step(directory: Path) -> int:
    return max((entry["step"] for entry in read_log(directory)), default=0)


@pytest.mark.slow
def test_ctrl_c_keeps_a_checkpoint(home):
    (home / "train.toml").write_text(
        SETTINGS.replace("steps = 20", "steps = 100000").replace("every = 10", "every = 99")
    )
    process = subprocess.Popen([sys.executable, "-m", "lsjax", "train", "--config", str(home / "train.toml")])
    begin = time.monotonic()
    while not ((home / "run").exists() and _last_step(home / "run") >= 3):
        assert process.poll() is None
        assert time.monotonic() - begin < 200
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    last = losses(home / "run")[-1][0]
    assert (home / "run" / "checkpoints" / str(last)).is_dir()
