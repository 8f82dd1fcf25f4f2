"""The examples that need no download, run as they stand (quickstart: see test_demo; parity: test_parity)."""

import itertools
import re
import runpy
import sys
from pathlib import Path

import pytest
from checkpoints import model_config, write_byte_tokenizer
from support import random_params

import lsjax

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_a_codebase_calls_generate_in_its_own_jit(capsys):
    runpy.run_path(str(EXAMPLES / "existing_codebase.py"), run_name="__main__")
    out = capsys.readouterr().out
    first, *_, last = re.findall(r"(\d+)% of the tokens right.* (\d+)% of the drafts accepted", out)
    assert int(first[0]) < 50 < 95 < int(last[0])
    assert int(first[1]) < 50 < 75 < int(last[1])
    row = [int(token) for token in re.findall(r"\d+", out.splitlines()[-1])]
    assert len(row) == 24
    assert len({(after - before) % 32 for before, after in itertools.pairwise(row)}) == 1


@pytest.mark.usefixtures("fewer_optimizations")
def test_streaming_shows_what_generate_writes(tmp_path, capsys, monkeypatch):
    config = model_config(vocab_size=258, num_hidden_layers=2, eos_token_id=257)
    lsjax.save(random_params(config, seed=0, deep_from=1, deep_scale=0.3), tmp_path / "model")
    chat = "{% for turn in messages %}<s>{{ turn.content }}{% endfor %}"
    write_byte_tokenizer(tmp_path / "model", chat_template=chat, pad_token="</s>")
    monkeypatch.setattr(sys, "argv", ["streaming.py", str(tmp_path / "model"), "1"])
    scope = runpy.run_path(str(EXAMPLES / "streaming.py"), run_name="__main__")
    out = capsys.readouterr().out
    generator = scope["generator"]
    expected = generator.generate("Why is the sky blue?", chat=True, stop="\n\n", max_new_tokens=48)
    shown = out[: out.index(f"\n{expected.finish_reason}: {len(expected.tokens)} tokens in ")]
    assert re.sub("\033\\[\\d*m", "", shown) == expected.text
    assert "\033[32m" in shown
    assert "\033[35m" in shown
    first, second = (int(count) for count in re.findall(r"new tokens: \[(\d+), (\d+)\]", out)[0])
    assert 12 <= first <= 16
    assert second == 48
    assert out.endswith(f"the state goes on at [{first + 16}, {second + 16}]\n")


@pytest.mark.slow
def test_the_batch_experiment_measures_what_agreement_predicts(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    config = model_config(vocab_size=258, num_hidden_layers=4)
    lsjax.save(random_params(config, seed=0, deep_from=1, deep_scale=0.1), tmp_path / "model")
    write_byte_tokenizer(tmp_path / "model")
    picture = tmp_path / "map.png"
    example = runpy.run_path(str(EXAMPLES / "batch_experiment.py"))
    example["main"](str(tmp_path / "model"), str(picture), exits=(1, 3), drafts=(1, 3), new_tokens=16)
    out = capsys.readouterr().out
    assert "4 pairs of exit layer and drafts, 6 prompts each: 24 acceptance rates from 4 programs" in out
    assert "predicted from 2 programs: the largest difference is 0.000000" in out
    rates = [float(rate) for rate in re.findall(r": (\d+\.\d)%|, 3: (\d+\.\d)%", out) for rate in rate if rate]
    assert len(rates) == 4
    assert max(rates) > 20
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_decoding_options_write_the_same_text_with_drafts(tmp_path, monkeypatch, capsys):
    lsjax.save(
        random_params(model_config(vocab_size=258, num_hidden_layers=3), seed=0, deep_from=1, deep_scale=0.1),
        tmp_path / "model",
    )
    write_byte_tokenizer(tmp_path / "model")
    monkeypatch.setattr("sys.argv", ["decoding_options.py", str(tmp_path / "model"), "1"])
    runpy.run_path(str(EXAMPLES / "decoding_options.py"), run_name="__main__")  # it asserts that texts are equal
    out = capsys.readouterr().out
    kept = [(int(some), int(of)) for some, of in re.findall(r"(\d+) of (\d+) drafts kept", out)]
    assert len(kept) == 7
    assert all(some <= of for some, of in kept)
    assert max(some for some, _ in kept) > 5
    assert len(re.findall(r": -?\d+\.\d+, \[", out)) == 4
