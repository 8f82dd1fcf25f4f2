"""The demo model, a real one, against transformers' own reading of the same file in torch."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import lsjax
from lsjax import sources
from lsjax.measure.parity import LOGITS_TOLERANCE, compare_logits, compare_tokens
from lsjax.measure.reference import load_reference
from lsjax.text.prompts import PROMPTS, encode
from lsjax.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.demo

NEW = 96


@pytest.fixture(scope="module")
def params():
    return lsjax.load("demo")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("demo")


@pytest.fixture(scope="module")
def reference():
    pytest.importorskip("torch")
    return load_reference(sources.locate("demo"))


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [encode(prompt, tokenizer) for prompt in PROMPTS]


def test_the_demo_is_smollm2(params):
    assert params.num_parameters == 134_515_008
    assert params.config.num_hidden_layers == 30
    assert params.config.tie_word_embeddings
    assert params.dtype == np.float32


def test_logits_equal_torch(params, reference, prompts):
    tokens = np.concatenate(prompts)[None]
    assert tokens.shape[1] >= 64
    rows = compare_logits(params, reference, tokens, tokens >= 0, (4, 17, 30), LOGITS_TOLERANCE)
    assert [row.where.split()[0] for row in rows] == ["row"] * 3
    assert all(row.ok and row.error < 1e-3 for row in rows), rows


@pytest.mark.slow
def test_greedy_tokens_equal_torch_at_several_exits_alone_and_in_a_batch(params, reference, prompts):
    expected = [reference.generate(prompt.tolist(), NEW, ()) for prompt in prompts]
    options = {"max_new_tokens": NEW, "eos_token_id": ()}
    runs = [
        compare_tokens(params, reference, prompts, expected, exit_layer=depth, **options) for depth in (None, 4, 10, 24)
    ]
    runs += [
        compare_tokens(params, reference, [prompt], [text], exit_layer=depth, **options)
        for depth in (None, 10)
        for prompt, text in zip(prompts, expected, strict=True)
    ]
    assert all(row.ok for row, _ in runs), runs
    assert sum(ties for _, ties in runs) <= 0.01 * 6 * len(prompts)


def test_quickstart_writes_the_same_text_twice(capsys, monkeypatch):
    script = Path(__file__).parent.parent / "examples" / "quickstart.py"
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert "Same text: True" in out
    texts = [line.strip() for line in out.splitlines() if "Alice and Bob" in line]
    assert len(texts) == 2
    assert texts[0] == texts[1]
