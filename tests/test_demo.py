"""The demo model, a real one, against transformers' own reading of the same file in torch."""

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import lsjax
from lsjax import sources
from lsjax.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.demo

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old clockmaker who",
    "def fibonacci(n):\n    ",
    "Ingredients for pancakes: two eggs, 300 ml of milk,",
    "Q: Why is the sky blue?\nA:",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three laws of thermodynamics say that energy",
    "1, 1, 2, 3, 5, 8,",
]
NEW = 96
TIE = 1e-4  # of the logits' standard deviation


@pytest.fixture(scope="module")
def params():
    return lsjax.load("demo")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("demo")


@pytest.fixture(scope="module")
def torch_model():
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    path = sources.locate("demo")
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [tokenizer(prompt).input_ids for prompt in PROMPTS]


def test_the_demo_is_smollm2(params):
    assert params.num_parameters == 134_515_008
    assert params.config.num_hidden_layers == 30
    assert params.config.tie_word_embeddings
    assert params.dtype == np.float32


@pytest.mark.parametrize("num_layers", [4, 17, 30])
def test_logits_equal_torch(params, torch_model, tokenizer, num_layers):
    import torch

    tokens = np.array(tokenizer(" ".join(PROMPTS)).input_ids)[None]
    assert tokens.shape[1] >= 64
    layers = torch_model.model.layers
    try:
        torch_model.model.layers = layers[:num_layers]
        torch_model.config.num_hidden_layers = num_layers
        with torch.no_grad():
            expected = torch_model(torch.tensor(tokens)).logits.numpy()
    finally:
        torch_model.model.layers, torch_model.config.num_hidden_layers = layers, len(layers)
    assert np.abs(lsjax.forward(params, tokens, num_layers=num_layers) - expected).max() < 1e-3


def torch_text(model, prompt: list[int]) -> list[int]:
    import torch

    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0].tolist()


def torch_margin(model, text: list[int]) -> float:
    """The gap between torch's two best next tokens, over the logits' standard deviation."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, -1]
    best = logits.topk(2).values
    return float((best[0] - best[1]) / logits.std())


@pytest.mark.slow
def test_greedy_tokens_equal_torch_at_several_exits_alone_and_in_a_batch(params, torch_model, prompts):
    expected = [torch_text(torch_model, prompt) for prompt in prompts]
    options = {"max_new_tokens": NEW, "eos_token_id": ()}
    lengths = np.array([len(prompt) for prompt in prompts])
    padded = np.array([prompt + [0] * (lengths.max() - len(prompt)) for prompt in prompts])
    runs = {}
    for exit_layer in (None, 4, 10, 24):
        out = lsjax.generate(params, padded, prompt_lengths=lengths, exit_layer=exit_layer, **options)
        runs["batch", exit_layer] = [
            row[: length + NEW] for row, length in zip(np.asarray(out.tokens), lengths, strict=True)
        ]
    for exit_layer in (None, 10):
        runs["alone", exit_layer] = [
            lsjax.generate(params, np.array(prompt), exit_layer=exit_layer, **options).tokens for prompt in prompts
        ]
    ties = []
    for name, texts in runs.items():
        for row, (text, want) in enumerate(zip(texts, expected, strict=True)):
            text = np.asarray(text).tolist()
            if text != want:
                first = next(i for i, pair in enumerate(zip(text, want, strict=True)) if pair[0] != pair[1])
                assert torch_margin(torch_model, want[:first]) < TIE, (name, row, first)
                ties.append((name, row, first))
    assert len(ties) <= 0.01 * 8 * len(runs), ties


def test_quickstart_writes_the_same_text_twice(capsys, monkeypatch):
    script = Path(__file__).parent.parent / "examples" / "quickstart.py"
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    out = capsys.readouterr().out
    assert "Same text: True" in out
    texts = [line.strip() for line in out.splitlines() if "Alice and Bob" in line]
    assert len(texts) == 2
    assert texts[0] == texts[1]
