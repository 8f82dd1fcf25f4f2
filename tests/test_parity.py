"""Parity as a user meets it: a report that is readable and strict, a command, and inputs that do not fit."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import random_model, write_plain

import lsjax
import lsjax.cli
from lsjax.measure import ParityReport, ParityRow
from lsjax.measure.parity import TIE, compare_tokens
from lsjax.measure.report import compare, worse
from lsjax.text.prompts import pad_rows

EXAMPLE = Path(__file__).parents[1] / "examples" / "parity_check.py"


@pytest.fixture(scope="module")
def params():
    return random_model(5)


@pytest.fixture(scope="module")
def directory(params, tmp_path_factory):
    pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("parity") / "checkpoint"
    write_plain(directory, params)
    return str(directory)


# The report.


def test_an_error_is_relative_to_the_deviation_and_to_the_number_itself():
    expected = np.random.default_rng(0).normal(size=(2, 3, 50))
    expected[1, 2, 3] = 1e6  # one huge activation
    found = expected.copy()
    found[1, 2, 3] += 1  # a millionth of it
    row = compare("x", found, expected, 1e-5)
    assert row.ok
    assert row.where == "row 1, position 2"
    assert row.error == 1
    assert row.scale == pytest.approx(1e6 + expected.std())
    calm, off = expected[:1], found[:1].copy()
    off[0, 1, 7] += 0.01
    row = compare("x", off, calm, 1e-5)
    assert not row.ok
    assert (row.where, row.error) == ("row 0, position 1", pytest.approx(0.01))
    assert row.relative == pytest.approx(0.01 / (calm.std() + abs(calm[0, 1, 7])))


def test_padding_is_left_out_and_shapes_must_agree():
    expected = np.random.default_rng(0).normal(size=(2, 3, 4))
    found, valid = expected.copy(), np.array([[True, True, False], [True, False, False]])
    found[0, 2] += 1
    assert compare("x", found, expected, 1e-9, valid=valid).error == 0
    found[1, 0, 1] += 1
    assert compare("x", found, expected, 1e-9, valid=valid).where == "row 1, position 0"
    with pytest.raises(ValueError, match=r"x: expected the reference's shape \(2, 3, 4\), got \(2, 3, 3\)"):
        compare("x", found[..., :3], expected, 1e-9)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("ours", [True, False])
def test_what_is_not_a_number_never_passes(value, ours):
    good = np.ones((1, 2, 3))
    bad = good.copy()
    bad[0, 1, 2] = value
    row = compare("x", *((bad, good) if ours else (good, bad)), tolerance=1e9)
    assert not row.ok
    assert row.where == "row 0, position 1"
    assert worse(compare("x", good, good, 1.0), row) is row
    assert worse(row, compare("x", good + 1, good, 1.0)) is row or value == np.inf
    json.dumps(ParityReport((row,)).to_dict(), allow_nan=False)


def test_the_report_is_a_table_and_fails_with_it():
    fine, bad = ParityRow("norm", 1e-7, 1.0, 1e-5, "row 0, position 1"), ParityRow("mlp", 0.5, 2.0, 1e-5, "layers.3")
    report = ParityReport((fine, bad), "given ids: 1 rows, 9 tokens", texts=8, ties=1)
    lines = str(report).splitlines()
    assert lines[0].split() == ["compared", "largest", "error", "scale", "relative", "tolerance", "where"]
    assert lines[1].split() == ["norm", "1.0e-07", "1", "1.0e-07", "1e-05", "row", "0,", "position", "1"]
    assert lines[2].startswith("mlp")
    assert lines[2].endswith("layers.3  <- PAST THE TOLERANCE")
    assert "1 of 2 comparisons are past their tolerances, first of all mlp, layers.3. 1 of 8 texts" in lines[-1]
    assert (report.ok, report.failures) == (False, (bad,))
    assert report["mlp"] is bad
    with pytest.raises(KeyError, match="expected one of norm, mlp"):
        report["attention"]
    with pytest.raises(AssertionError, match="PAST THE TOLERANCE"):
        report.assert_close()
    ParityReport((fine,)).assert_close()
    assert report.to_dict()["rows"][1] == {
        "what": "mlp",
        "error": 0.5,
        "scale": 2.0,
        "relative": 0.25,
        "tolerance": 1e-5,
        "where": "layers.3",
        "ok": False,
    }


# Tokens: texts may part at a tie, and nowhere else.


class Judge:
    """A reference whose logits are given: the best token 1, another one ``gap`` deviations behind it."""

    def __init__(self, vocabulary: int, other: int, gap: float) -> None:
        self.logits_row = np.random.default_rng(0).normal(size=vocabulary)
        self.logits_row[1] = 9.0
        for _ in range(20):  # the deviation depends on the logit a little
            self.logits_row[other] = 9.0 - gap * self.logits_row.std()
        self.asked = []

    def logits(self, tokens, num_layers=None):
        self.asked.append(tokens.tolist())
        return np.broadcast_to(self.logits_row, (*tokens.shape, len(self.logits_row)))


@pytest.mark.parametrize(("gap", "ties"), [(0.5 * TIE, 1), (2 * TIE, 0), (1.0, 0)])
def test_texts_may_part_at_a_tie_only(params, gap, ties):
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (24, 2, 5, 3)]
    options = {"max_new_tokens": 6, "eos_token_id": ()}
    tokens, lengths = pad_rows(prompts)
    out = lsjax.generate(params, tokens, prompt_lengths=lengths, **options)
    texts = [row[: length + 6].tolist() for row, length in zip(np.asarray(out.tokens), lengths, strict=True)]
    judge: Any = Judge(params.config.vocab_size, texts[1][5], gap)
    row, found = compare_tokens(params, judge, prompts, texts, exit_layer=None, **options)
    assert (row.ok, row.error, found, row.where) == (True, 0, 0, "all equal")
    assert not judge.asked
    expected = [*texts[1][:5], 1, *texts[1][6:]]
    row, found = compare_tokens(params, judge, prompts, [texts[0], expected, *texts[2:]], exit_layer=None, **options)
    assert judge.asked == [[texts[1][:5]]]  # the judge reads the text up to there
    assert (row.ok, found) == (bool(ties), ties)
    assert row.relative == pytest.approx(gap, rel=0.05)
    assert row.where == f"text 1, new token 4: id {texts[1][5]}, expected 1"
    row, _ = compare_tokens(params, judge, prompts, [texts[0], texts[1][:4], *texts[2:]], exit_layer=None, **options)
    assert not row.ok
    assert row.where == "text 1, new token 3: one text ends"


# The command and the example, on a checkpoint without a tokenizer.


def test_the_command_compares_everything(directory, capsys):
    arguments = ["parity", directory, "--max-new-tokens", "6", "--exit-layer", "1", "--depths", "1,3"]
    assert lsjax.cli.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert report["model"] == directory
    assert report["inputs"] == "random ids: 4 rows, 58 tokens"
    names = [row["what"] for row in report["rows"]]
    assert names[:3] == ["embed_tokens", "rotary cos", "rotary sin"]
    assert names[-4:] == [
        "logits, 1 of 3 layers",
        "logits, 3 of 3 layers",
        "tokens, autoregressive",
        "tokens, exit layer 1",
    ]
    assert (report["texts"], report["ties"]) == (8, 0)
    assert lsjax.cli.main([*arguments, "--tolerance", "1e-12"]) == 1
    out = capsys.readouterr().out
    assert out.count("PAST THE TOLERANCE") >= 5
    assert "tokens, autoregressive" not in [line.split("  ")[0] for line in out.splitlines() if "PAST" in line]


def test_a_checkpoint_that_is_read_wrongly_is_found_out(directory, params, tmp_path, capsys):
    """transformers reads another value projection than lsjax does."""
    from lsjax.measure import parity

    other = lsjax.load(directory)
    kernel = other.tree["layers_1"]["self_attn"]["v_proj"]["kernel"]
    other.tree["layers_1"]["self_attn"]["v_proj"]["kernel"] = kernel[:, ::-1]
    write_plain(tmp_path / "other", other)
    from lsjax.measure.reference import load_reference

    model = load_reference(tmp_path / "other").model
    report = parity(directory, model, max_new_tokens=6, exit_layer=1, depths=(1, 3))
    assert [row.what for row in report.failures][:3] == ["self_attn.v_proj", "self_attn", "whole layer"]
    assert report.failures[0].where == "layers.1"
    assert report["logits, 1 of 3 layers"].ok
    assert not report["logits, 3 of 3 layers"].ok
    assert not report["tokens, autoregressive"].ok
    assert not report["tokens, exit layer 1"].ok


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: SRC"),
        (["m", "--depths", "4,x"], "expected numbers of layers such as 4,8,16, got '4,x'"),
        (["m", "--depths", "0"], "got '0'"),
        (["m", "--tolerance", "0"], "expected a number above 0, got '0'"),
        (["m", "--tolerance", "nan"], "expected a number above 0, got 'nan'"),
        (["no such source"], "there is no such file or directory"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    assert lsjax.cli.main(["parity", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    assert message in err


def test_what_does_not_fit_the_checkpoint(directory, params, tmp_path, capsys):
    assert lsjax.cli.main(["parity", directory, "--depths", "4"]) == 2
    assert "depths: expected a layer in 1..3, got 4" in capsys.readouterr().err
    assert lsjax.cli.main(["parity", directory, "--prompt", "hello"]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err
    lsjax.save(params, tmp_path / "saved")
    assert lsjax.cli.main(["parity", str(tmp_path / "saved")]) == 2
    assert "written by lsjax, which transformers does not read" in capsys.readouterr().err


def test_what_does_not_fit_the_reference(params):
    pytest.importorskip("torch")
    from support import transformers_model

    parity, model = lsjax.measure.parity, transformers_model(params)
    with pytest.raises(ValueError, match="expected a LlamaForCausalLM to compare params with, got None"):
        parity(params)
    with pytest.raises(TypeError, match="reference: expected a LlamaForCausalLM of transformers, got Params"):
        parity(params, params)
    with pytest.raises(TypeError, match="params: expected lsjax"):
        parity(params.tree, model)
    other = random_model(5, num_hidden_layers=2)
    with pytest.raises(ValueError, match="reference: expected num_hidden_layers 2, as params have it, got 3"):
        parity(other, model)
    low = lsjax.Params(
        params.config, {**params.tree, "norm": {"scale": params.tree["norm"]["scale"].astype("bfloat16")}}
    )
    with pytest.raises(ValueError, match="params: expected concrete arrays in float32"):
        parity(low, model)
    with pytest.raises(ValueError, match="give prompts or tokens, not both"):
        parity(params, model, tokens=[1], prompts=["a"])
    with pytest.raises(ValueError, match="params come without a tokenizer: give tokens"):
        parity(params, model, prompts=["a"])
    with pytest.raises(ValueError, match=r"expected ids in 0\.\.130, got 131"):
        parity(params, model, tokens=[[1], [2, 131]])
    with pytest.raises(ValueError, match="at least one token a row"):
        parity(params, model, tokens=[])
    with pytest.raises(ValueError, match=r"expected float32 on cpu .*, got bfloat16 on cpu"):
        parity(params, model.bfloat16())


def test_the_model_of_torch_is_left_as_it_was(params, directory):
    from support import transformers_model

    model = transformers_model(params)
    before = (model.generation_config, model.config.num_hidden_layers, len(model.model.layers))
    report = lsjax.measure.parity(directory, model, max_new_tokens=6, exit_layer=1, depths=(1, 3))
    report.assert_close()
    assert (model.generation_config, model.config.num_hidden_layers, len(model.model.layers)) == before
    assert not any(module._forward_hooks for module in model.modules())


def test_without_torch_the_error_says_what_to_install(params, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="install lsjax with its extra 'torch'"):
        lsjax.measure.parity(params, object())


def test_the_example_runs_on_a_checkpoint(directory, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), directory])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "comparisons are within their tolerances" in capsys.readouterr().out


def test_rows_cannot_be_changed():
    row = ParityRow("norm", 1e-7, 1.0, 1e-5, "")
    with pytest.raises(dataclasses.FrozenInstanceError):
        row.error = 0.0  # type: ignore[misc]


@pytest.mark.slow
def test_longrope_is_compared_on_both_sides_of_its_original_length(tmp_path):
    pytest.importorskip("torch")
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
    rope = {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 32, **factors}
    write_plain(tmp_path, random_model(5, rope_scaling=rope, num_hidden_layers=2))
    rng = np.random.default_rng(0)
    for lengths, new in (((20,), 0), ((10, 40), 8)):
        rows = [rng.integers(0, 131, length) for length in lengths]
        report = lsjax.measure.parity(tmp_path, tokens=rows, max_new_tokens=new)
        report.assert_close()


def test_no_prompts_are_refused(directory):
    with pytest.raises(ValueError, match="prompts: expected at least one text, got none"):
        lsjax.measure.parity(directory, prompts=[])
