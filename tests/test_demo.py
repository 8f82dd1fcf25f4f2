"""The demo model, a real one, against transformers' own reading of the same file in torch."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import lsjax
from lsjax import sources
from lsjax.measure.parity import LOGITS_TOLERANCE, TIE, compare_logits, compare_tokens
from lsjax.measure.reference import load_reference
from lsjax.text.prompts import PROMPTS, encode, pad_rows
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


def is_greedy(reference, text: list[int], start: int) -> bool:
    """Whether torch, reading the text once, would have picked every token from ``start`` on, or one that ties with it.

    A greedy text is the only one of which this holds, token after token.
    """
    logits = reference.logits(np.array([text]))[0, start - 1 : -1]
    gaps = logits.max(axis=-1) - np.take_along_axis(logits, np.array(text[start:])[:, None], axis=-1)[:, 0]
    return bool((gaps <= TIE * logits.std(axis=-1)).all())


@pytest.mark.slow
def test_greedy_tokens_equal_torch_at_several_exits_alone_and_in_a_batch(params, reference, prompts):
    prepared, options = lsjax.prepare(params), {"max_new_tokens": NEW, "eos_token_id": ()}
    (rows, widths), lengths = pad_rows(prompts), [len(prompt) for prompt in prompts]
    texts = []
    for model, depth, drafts in ((params, None, 0), (prepared, 4, 4), (params, 10, 4), (prepared, 24, 2)):
        plan = {"exit_layer": depth, "num_speculations": drafts, "prompt_lengths": widths}
        out = np.asarray(lsjax.generate(model, rows, **plan, **options).tokens)
        texts.append([row[: length + NEW].tolist() for row, length in zip(out, lengths, strict=True)])
    for index, prompt in enumerate(prompts[::2]):
        depth, model = ((None, prepared), (10, params))[index % 2]
        alone = lsjax.generate(model, prompt, exit_layer=depth, **options).tokens
        texts.append([alone.tolist() if at == 2 * index else text for at, text in enumerate(texts[0])])

    parted = 0
    for prompt, length, versions in zip(prompts, lengths, zip(*texts, strict=True), strict=True):
        distinct = {tuple(text) for text in versions}
        parted += len(distinct) - 1
        assert all(text[:length] == tuple(prompt.tolist()) and len(text) == length + NEW for text in distinct)
        assert all(is_greedy(reference, list(text), length) for text in distinct)
    assert parted <= 0.01 * len(texts) * len(prompts)
    # And token by token, as transformers itself generates.
    row, ties = compare_tokens(
        params, reference, prompts[:1], [reference.generate(prompts[0].tolist(), NEW, ())], exit_layer=None, **options
    )
    assert row.ok
    assert not ties
    changed = texts[0][0].copy()
    changed[lengths[0] + 50] += 1
    assert not is_greedy(reference, changed, lengths[0])


def test_quickstart_writes_the_same_text_twice(capsys, monkeypatch):
    script = Path(__file__).parent.parent / "examples" / "quickstart.py"
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert "Same text: True" in out
    texts = [line.strip() for line in out.splitlines() if "Alice and Bob" in line]
    assert len(texts) == 2
    assert texts[0] == texts[1]
