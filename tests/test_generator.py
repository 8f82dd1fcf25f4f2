"""Prompts to texts: results, stop strings in a batch, pieces as they come."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import model_config, random_model, write_byte_tokenizer
from support import counted_compilations, random_params
from vocabularies import byte_level, sentencepiece

import lsjax
from lsjax.text.generator import TextGenerator
from lsjax.text.growing import GrowingText
from lsjax.text.stopping import StopStrings
from lsjax.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("fewer_optimizations")

CHAT = "{% for turn in messages %}<s>{{ turn.role }}: {{ turn.content }}\n{% endfor %}"
PIECES = (b" Paris", b" is", b" the", b".\n")
EOS, BOS = 261, 260
NEW = 24
SPECULATIVE: dict[str, Any] = {"exit_layer": 1, "num_speculations": 3, "max_new_tokens": NEW, "capacity": 64}
PROMPTS = ["The capital is", "One, two,", "x", "A longer prompt."]


@pytest.fixture(scope="module")
def generator():
    tokenizer = byte_level(*PIECES, chat_template=CHAT)
    config = model_config(vocab_size=262, num_hidden_layers=2, eos_token_id=EOS, bos_token_id=BOS)
    return TextGenerator(lsjax.prepare(random_params(config, 3, deep_from=1, deep_scale=0.3)), tokenizer)


@pytest.fixture(scope="module")
def plain(generator):
    """What is written without stop strings."""
    return generator.generate(PROMPTS, **SPECULATIVE)


def scripted(generator, prompt: str, script: list[int]):
    """A processor that makes the text after a prompt this one, and then an EOS."""
    begin, ids = len(generator.tokenizer(prompt)["input_ids"]), jnp.array([*script, EOS])

    def force(logits, tokens, lengths):
        token = ids[jnp.minimum(lengths - begin, len(script))]
        return jnp.where(jnp.arange(logits.shape[-1]) == token[:, None], 100.0, logits)

    return force


def ids(*words: bytes) -> list[int]:
    return [token for word in words for token in ([256 + PIECES.index(word)] if word in PIECES else word)]


def test_results_are_what_generate_writes(generator, plain):
    tokenizer = generator.tokenizer
    for prompt, result in zip(PROMPTS, plain, strict=True):
        tokens = tokenizer(prompt)["input_ids"]
        out = lsjax.generate(generator.params, tokens, max_new_tokens=NEW, capacity=64)
        new = np.asarray(out.tokens)[len(tokens) : int(out.lengths)].tolist()
        assert result.tokens.tolist() == new
        assert result.text == tokenizer.decode(tokens + new, skip_special_tokens=True)[len(prompt) :]
        assert (result.finish_reason, result.stop, result.scores) == ("length", None, None)
        assert int(result.stats.new_tokens) == len(new)
        assert result.stats.accept_histogram.shape == (4,)
    assert len({result.text for result in plain}) == len(PROMPTS)


def test_one_prompt_one_result(generator, plain):
    result = generator.generate(PROMPTS[0], **SPECULATIVE)
    assert (result.text, result.tokens.tolist()) == (plain[0].text, plain[0].tokens.tolist())
    (result,) = generator.generate(PROMPTS[:1], **SPECULATIVE)
    assert result.text == plain[0].text


def test_why_a_text_ended(generator, plain):
    tokens = plain[0].tokens.tolist()
    (first, second), third = tokens[4:6], tokens[8]
    pair = next(at for at in range(NEW) if tokens[at : at + 2] == [first, second]) + 2
    options = SPECULATIVE | {"eos_token_id": (), "stop_sequences": [[0, 0]]}  # so that all share a program
    for changes, reason, count in [
        ({"eos_token_id": second}, "eos", tokens.index(second) + 1),
        ({"eos_token_id": [third, second]}, "eos", min(map(tokens.index, (second, third))) + 1),
        ({"stop_sequences": [[first, second]]}, "stop", pair),
        ({"stop_sequences": [[first, second]], "eos_token_id": second}, "eos", tokens.index(second) + 1),
        ({"stop_sequences": [[first, second]], "max_new_tokens": pair}, "stop", pair),  # at the limit, and yet a stop
        ({}, "length", NEW),
    ]:
        for stop in (None, "a text that never comes"):
            result = generator.generate(PROMPTS[0], stop=stop, **options | changes)
            assert (result.finish_reason, result.stop, len(result.tokens)) == (reason, None, count)


SCRIPT = ids(b"It", b" is", b" Paris", b" the", b" end", b".\n")


@pytest.fixture(scope="module")
def forced(generator):
    return scripted(generator, "A prompt: It", SCRIPT)


@pytest.mark.parametrize("process_drafts", [True, False])
@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        (" Pari", "It is", 4),  # inside a token
        ("is the", "It is Par", 5),  # over tokens
        ("t is Paris the", "I", 5),  # over rounds
        (["the", "s P"], "It i", 4),  # the one that is whole first
        (["aris", " Paris"], "It is", 4),  # the one that begins earliest
        ("It", "", 2),  # the first characters
        (".\n", "It is Paris the end", 10),  # in the text's last token
        ("prompt", "It is Paris the end.\n", 11),  # not in the text
    ],
)
def test_where_stop_strings_end_a_text(generator, forced, stop, text, count, process_drafts):
    """Of a text that is forced on the model, with drafts that are all accepted, or hardly any."""
    options = SPECULATIVE | {"processors": forced, "process_drafts": process_drafts}
    result = generator.generate("A prompt: It", stop=stop, **options)
    assert (result.text, len(result.tokens)) == (text, count)
    assert result.tokens.tolist() == [*SCRIPT, EOS][:count]
    assert result.finish_reason == ("eos" if stop == "prompt" else "stop")
    again = generator.generate("A prompt: It", stop=stop, include_stop=True, **options)
    assert again.text == text + (again.stop or "")


STRATEGIES = [SPECULATIVE, {"exit_layer": 1, "strategy": "early_exit"}, {}]


@pytest.mark.parametrize(
    ("strategy", "drawing"),
    [
        (STRATEGIES[0], {}),
        pytest.param(STRATEGIES[0], {"temperature": 0.7}, marks=pytest.mark.slow),
        pytest.param(STRATEGIES[1], {}, marks=pytest.mark.slow),
        (STRATEGIES[2], {"top_k": 50}),
    ],
)
def test_stop_strings_in_a_batch(generator, strategy, drawing):
    """Each row's text, tokens and scores are the beginning of what is written without stop strings."""
    options = {"max_new_tokens": NEW, "capacity": 64, "log_probs": True, **strategy, **drawing}
    if drawing:
        options["key"] = jax.random.key(1)
    full = generator.generate(PROMPTS, **options)
    stops = [full[0].text[5:7], full[1].text[3], full[2].text[-1]]
    found = generator.generate(PROMPTS, stop=stops, **options)
    reasons = []
    for prompt, whole, result in zip(PROMPTS, full, found, strict=True):
        text = GrowingText(generator.tokenizer, generator.tokenizer(prompt)["input_ids"], StopStrings(stops))
        for token in whole.tokens:
            if text.push(token):
                break
        text.finish()
        assert (result.text, result.stop, result.tokens.tolist()) == (text.text, text.stop, text.tokens)
        for name in ("log_probs", "processed_log_probs"):
            values = getattr(whole.scores, name)
            assert values.shape == whole.tokens.shape
            np.testing.assert_allclose(getattr(result.scores, name), values[: len(result.tokens)], atol=1e-4)
        reasons.append(result.finish_reason)
        assert int(result.stats.new_tokens) >= len(result.tokens)
    assert reasons[:2] == ["stop", "stop"]


def test_other_stop_strings_compile_nothing(generator):
    generator.generate(PROMPTS, stop="\x00", **SPECULATIVE)
    with counted_compilations() as compiled:
        generator.generate(PROMPTS, stop=["a", "bc"], **SPECULATIVE)
    assert compiled == []


def test_chats_and_texts(generator):
    """A chat goes through the template, texts where asked for; the template's special tokens are not added twice."""
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "?"},
    ]
    tokens = [BOS, *b"user: Hi\n", BOS, *b"assistant: Ho\n", BOS, *b"user: ?\n"]
    out = lsjax.generate(generator.params, tokens, max_new_tokens=NEW)
    expected = np.asarray(out.tokens)[len(tokens) : int(out.lengths)].tolist()
    assert generator.generate(turns, max_new_tokens=NEW).tokens.tolist() == expected
    single, chat, text = generator.generate([turns[:1], turns, "Hi"], max_new_tokens=NEW)
    assert chat.tokens.tolist() == expected
    assert generator.generate("Hi", chat=True, max_new_tokens=NEW).tokens.tolist() == single.tokens.tolist()
    assert text.tokens.tolist() != single.tokens.tolist()


def test_the_first_word_keeps_its_space(generator):
    """A tokenizer in SentencePiece's manner, which drops it where a text is decoded alone."""
    tokenizer = sentencepiece("▁The", "▁is", "▁Paris")
    other = TextGenerator(generator.params, tokenizer)
    the, *script = (tokenizer.get_vocab()[word] for word in ("▁The", "▁is", "▁Paris"))
    result = other.generate("The", max_new_tokens=8, processors=scripted(other, "The", script))
    assert result.text == " is Paris"
    assert tokenizer.decode([the, *script]) == "The" + result.text
    assert tokenizer.decode(script) == "is Paris"


# As it is written.


@pytest.mark.parametrize("strategy", [STRATEGIES[0], pytest.param(STRATEGIES[2], marks=pytest.mark.slow)])
def test_pieces_are_the_text_that_generate_returns(generator, plain, strategy):
    options = {"max_new_tokens": NEW, "capacity": 64, "log_probs": True, **strategy}
    stop = plain[1].text[12:14]
    for ends in ({}, {"stop": stop}, {"stop": stop, "include_stop": True}):
        expected = generator.generate(PROMPTS[1], **options, **ends)
        stream = generator.stream(PROMPTS[1], **options, **ends)
        pieces = list(stream)
        result = stream.result
        assert "".join(piece.text for piece in pieces) == result.text == expected.text
        assert result.tokens.tolist() == expected.tokens.tolist()
        assert (result.finish_reason, result.stop) == (expected.finish_reason, expected.stop)
        assert result.scores.log_probs.shape == result.tokens.shape
        np.testing.assert_allclose(result.scores.log_probs, expected.scores.log_probs, atol=1e-4)
        assert len(pieces) > 1
        assert all(text for piece in pieces for text, _ in piece.runs)
        if not ends:
            jax.tree.map(np.testing.assert_array_equal, result.stats, expected.stats)


def test_runs_are_drafts_and_the_models_own(generator, plain):
    """Each token here is a byte, so drafted characters are drafted tokens, in their places."""
    tokens = generator.tokenizer(PROMPTS[2])["input_ids"]
    blocks = list(lsjax.stream(generator.params, tokens, **SPECULATIVE))
    expected = [bool(flag) for block in blocks for flag in block.drafted[0, : block.counts[0]]]
    drafted: list[bool] = []
    detokenized = GrowingText(generator.tokenizer, tokens)
    for token, flag in zip(plain[2].tokens, expected, strict=True):
        detokenized.push(token, flag)
    detokenized.finish()
    for piece in generator.stream(PROMPTS[2], **SPECULATIVE):
        for text, flag in piece.runs:
            drafted += [flag] * len(text)
    runs = [flag for text, flag in detokenized.take() for _ in text]
    assert drafted == runs
    assert {True, False} == set(drafted)


def test_a_stream_can_be_ended(generator, plain):
    stream = generator.stream(PROMPTS[0], **SPECULATIVE)
    with pytest.raises(RuntimeError, match="expected a text that has ended"):
        _ = stream.result
    first = next(stream).text
    stream.stop()
    text = first + "".join(piece.text for piece in stream)
    assert list(stream) == []
    result = stream.result
    assert result.finish_reason == "stop"
    assert plain[0].tokens.tolist()[: len(result.tokens)] == result.tokens.tolist()
    assert (result.text, result.stop) == (text, None)
    assert 0 < len(result.tokens) < NEW


# Loading, and what is refused.


def test_from_pretrained(tmp_path):
    params = random_model(3, num_hidden_layers=2, vocab_size=258)
    lsjax.save(params, tmp_path / "model")
    write_byte_tokenizer(tmp_path / "model")
    generator = lsjax.TextGenerator.from_pretrained(tmp_path / "model", "bfloat16")
    assert isinstance(generator.params, lsjax.DecodeParams)
    assert generator.params.dtype == "bfloat16"
    tokens = load_tokenizer(tmp_path / "model")("Hi")["input_ids"]
    out = lsjax.generate(generator.params, tokens, max_new_tokens=6)
    assert generator.generate("Hi", max_new_tokens=6).tokens.tolist() == out.tokens[2 : int(out.lengths)].tolist()
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match="holds no tokenizer"):
        lsjax.TextGenerator.from_pretrained(tmp_path / "model")


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (5, {}, "prompts: expected a text, a chat of messages .* got 5"),
        ([], {}, r"prompts: expected a text, .* got \[\]"),
        (["a", 5], {}, r"prompts: expected a text, .* got \['a', 5\]"),
        ([[1, 2]], {}, r"prompts: expected a text, .* got \[\[1, 2\]\]"),
        ("", {}, r"prompts: expected at least one token each, got '' \(number 0\)"),
        (["a", ""], {}, r"prompts: expected at least one token each, got '' \(number 1\)"),
        ([[]], {}, "messages: expected at least one, got an empty list"),
        ([{"role": "user"}], {}, r"""messages: expected \{"role": "user", .* got \{'role': 'user'\}"""),
        ([{"role": "user", "content": 5}], {}, "messages: expected .* got .*5"),
        ("caf\udcff", {}, r"prompt: expected Unicode text, got the lone surrogate in 'caf\\udcff'"),
        ("caf\udcff", {"chat": True}, "prompt: expected Unicode text"),
        ([{"role": "user", "content": "caf\udcff"}], {}, "messages: expected Unicode text"),
        ("a", {"stop": "\udcff"}, "stop: expected Unicode text"),
        ("a", {"stop": ""}, "stop: expected at least one character"),
        ("a", {"stop": ["b", 3]}, "stop: expected a string, or several of them, got 3 among them"),
        (
            "a",
            {"stop": "</s>"},
            "the special token '</s>', which texts never hold: end at its id instead, eos_token_id=261",
        ),
        ("a", {"attention_mask": [1]}, "attention_mask: prompts are encoded and padded here"),
        ("a", {"state": None}, "state: prompts are encoded and padded here"),
        ("a", {"exit_layer": 3}, r"exit_layer: expected a layer in 1\.\.2, got 3"),
        ("a", {"exit_layer": 3, "stop": "b"}, r"exit_layer: expected a layer in 1\.\.2, got 3"),
    ],
)
def test_bad_values_are_one_clear_error(generator, prompts, options, message):
    for call in (generator.generate, generator.stream):
        if call == generator.stream and prompts in ([[]], ["a", ""]):  # a list of several
            continue
        with pytest.raises(ValueError, match=message):
            call(prompts, **options)


def test_more_that_is_refused(generator):
    with pytest.raises(ValueError, match="prompt: expected one text or chat, got a list of 2"):
        generator.stream(["a", "b"])
    bare = TextGenerator(generator.params, byte_level(*PIECES))
    strict = TextGenerator(generator.params, byte_level(*PIECES, chat_template="{{ raise_exception('no system') }}"))
    for chat in ({"chat": True, "prompts": "a"}, {"prompts": [{"role": "user", "content": "a"}]}):
        with pytest.raises(ValueError, match="expected a tokenizer with a chat template, got one whose chat"):
            bare.generate(**chat)
        with pytest.raises(ValueError, match="chat template refuses these messages: no system"):
            strict.generate(**chat)
    with pytest.raises(TypeError, match=r"params: expected lsjax\.Params"):
        TextGenerator(generator.params.tree, generator.tokenizer)


def test_a_warning_points_at_the_callers_line(generator):
    config = dataclasses.replace(generator.params.config, max_position_embeddings=8)
    short = TextGenerator(lsjax.Params(config, random_params(config, 3).tree), generator.tokenizer)
    for call in (
        lambda: short.generate("abc", max_new_tokens=9),
        lambda: short.generate("abc", max_new_tokens=9, stop="x"),
        lambda: short.stream("abc", max_new_tokens=9),
        lambda: lsjax.stream(short.params, [1, 2, 3], max_new_tokens=9),
    ):
        with pytest.warns(UserWarning, match="12 tokens .* max_position_embeddings=8") as caught:
            call()
        assert [one.filename for one in caught] == [__file__]


# A real model.


@pytest.fixture(scope="module")
def demo():
    return lsjax.TextGenerator.from_pretrained("demo")


@pytest.mark.demo
def test_a_stop_string_inside_a_real_token(demo):
    """ "Pari", where " Paris" is one token."""
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    options: dict[str, Any] = {"max_new_tokens": 24, "log_probs": True, "exit_layer": 10}
    stream = demo.stream(chat, **options)
    pieces = list(stream)
    whole = stream.result
    found = demo.generate(chat, stop="Pari", **options)
    assert (whole.finish_reason, found.finish_reason, found.stop) == ("eos", "stop", "Pari")
    assert "".join(piece.text for piece in pieces) == whole.text == "The capital of France is Paris."
    assert found.text == "The capital of France is "
    assert demo.tokenizer.decode(found.tokens) == "The capital of France is Paris"
    assert found.tokens.tolist() == whole.tokens[: len(found.tokens)].tolist()
    assert found.scores.log_probs.shape == found.tokens.shape
    np.testing.assert_array_equal(found.scores.log_probs, whole.scores.log_probs[: len(found.tokens)])
