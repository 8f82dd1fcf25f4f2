"""``lsjax generate --stream``, drawn tokens and stop strings on the command line, and ``lsjax chat``."""

from __future__ import annotations

import builtins
import io
import json
import re
import shutil
import signal
import sys
from typing import Any

import jax
import numpy as np
import pytest
from chats import answer_alone, answers_alone
from checkpoints import model_config, write_byte_tokenizer
from support import random_params

import lsjax.cli
import lsjax.io
from lsjax.cli import generate, repl, streaming
from lsjax.cli.signals import handled
from lsjax.cli.text_options import drawing
from lsjax.text import conversation
from lsjax.text.generator import TextGenerator
from lsjax.text.streaming import TextPiece
from lsjax.text.tokenizer import load_tokenizer

pytestmark = pytest.mark.usefixtures("fewer_optimizations")

CHAT = "{% for turn in messages %}<s>{{ turn.role }}:{{ turn.content }}</s>{% endfor %}<s>assistant:"
NEW = 14
DRAWING = {"top_k": 20, "temperature": 0.8}
DRAWN = ["--top-k", "20", "--temperature", "0.8"]
GREEN, MAGENTA, PLAIN = "\033[32m", "\033[35m", "\033[0m"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Llama that writes printable characters."""
    directory = tmp_path_factory.mktemp("models") / "small"
    config = model_config(
        vocab_size=258, num_hidden_layers=2, eos_token_id=257, bos_token_id=256, max_position_embeddings=128
    )
    params = random_params(config, 3, deep_from=1, deep_scale=0.3)
    head = np.array(params.tree["lm_head"]["kernel"])
    head[:, 94:] = 0  # "!" to "~" are this tokenizer's first ids
    params.tree["lm_head"]["kernel"] = jax.numpy.asarray(head)
    lsjax.io.save(params, directory)
    write_byte_tokenizer(directory, chat_template=CHAT)
    return str(directory)


@pytest.fixture(scope="module")
def generator(model):
    return TextGenerator(lsjax.io.load(model), load_tokenizer(model))


@pytest.fixture
def call(model, capsys):
    """Runs a subcommand on the model: exit status, standard output, lines of standard error."""

    def run(command: str, *arguments: str, source: str = model) -> tuple[int, str, list[str]]:
        status = lsjax.cli.main([command, "--model", source, "--max-new-tokens", str(NEW), *arguments])
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return run


# lsjax generate.


def test_a_streamed_text_is_the_text(call, generator):
    expected = generator.generate("Once upon", exit_layer=1, max_new_tokens=NEW)
    status, out, err = call("generate", "--prompt", "Once upon", "--exit-layer", "1", "--stream")
    assert (status, out) == (0, expected.text + "\n")  # no terminal, no colours
    (line,) = err
    assert line.startswith(f"self_speculative: {len(expected.tokens)} new tokens in ")
    assert "of the drafts accepted" in line
    _, plain, again = call("generate", "--prompt", "Once upon", "--exit-layer", "1")
    assert plain == out
    numbers = re.compile(r"^\w+: \d+ new tokens|[\d.]+ tokens a round|[\d.]+%")
    assert numbers.findall(again[0]) == numbers.findall(line)


def test_several_prompts_are_streamed_one_after_the_other(call):
    """Each as the row of a batch that it is without --stream."""
    arguments = ["--prompt", "Once upon", "--prompt", "A time", *DRAWN, "--seed", "5"]
    _, batch, _ = call("generate", *arguments)
    status, out, _ = call("generate", *arguments, "--stream")
    assert (status, out) == (0, batch)
    assert out.startswith("== prompt 1: Once upon\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_drafts_have_one_colour_and_the_models_own_tokens_another(call, generator, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    tokens = generator.tokenizer("Once upon")["input_ids"]
    expected, drafts = "", 0
    for block in lsjax.stream(generator.params, tokens, exit_layer=1, max_new_tokens=NEW):
        kept = int(block.drafted[0].sum())
        drafted, own = (generator.tokenizer.decode(part) for part in (block.row(0)[:kept], block.row(0)[kept:]))
        expected += f"{GREEN}{drafted}{PLAIN}" * bool(drafted) + f"{MAGENTA}{own}{PLAIN}" * bool(own)
        drafts += kept
    assert 0 < drafts < NEW
    arguments = ["generate", "--prompt", "Once upon", "--stream"]
    for changes, colours in [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": "", "TERM": "dumb"}, False)]:
        for name, value in changes.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "stdout", shown := Terminal())
        status, _, err = call(*arguments, "--exit-layer", "1")
        plain = re.sub("\033\\[\\d*m", "", expected)
        assert (status, shown.getvalue()) == (0, (expected if colours else plain) + "\n")
        assert (streaming.LEGEND in err[-1]) == colours
        monkeypatch.undo()
        monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", shown := Terminal())
    call(*arguments)
    assert "\033" not in shown.getvalue()  # nothing is drafted, so there is nothing to tell apart


def test_every_piece_is_shown_at_once():
    file = Terminal()
    flushed: list[str] = []
    file.flush = lambda: flushed.append(file.getvalue())
    display = streaming.Display(file, colored=False)
    display.show(TextPiece((("a", True), ("b", False))))
    display.show(TextPiece((("c", False),)))
    assert flushed == ["ab", "abc"]


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_stop_strings(call, generator, stream):
    whole = generator.generate("Once upon", max_new_tokens=NEW).text
    status, out, err = call("generate", "--prompt", "Once upon", "--stop", "\x01", "--stop", whole[5:7], *stream)
    assert (status, out) == (0, whole[: whole.index(whole[5:7])] + "\n")
    assert err[0].startswith(f"autoregressive: {whole.index(whole[5:7]) + 2} new tokens")


def test_json_says_what_was_asked_for_and_why_texts_ended(call, generator):
    options: dict[str, Any] = {"key": jax.random.key(7), "max_new_tokens": NEW, **DRAWING}
    whole = generator.generate(["Once upon"], **options)[0]
    arguments = ["--prompt", "Once upon", *DRAWN, "--seed", "7", "--json"]
    _, out, _ = call("generate", *arguments)
    report = json.loads(out)
    assert (report["top_k"], report["temperature"], report["seed"]) == (20, 0.8, 7)
    assert (report["results"][0]["text"], report["results"][0]["finish_reason"]) == (whole.text, "length")
    _, out, _ = call("generate", *arguments, "--stop", whole.text[3])
    report = json.loads(out)
    assert report["stop"] == [whole.text[3]]
    assert report["results"][0]["finish_reason"] == "stop"
    assert report["results"][0]["text"] == whole.text[: whole.text.index(whole.text[3])]


def test_drawn_texts_depend_on_the_seed(call):
    first, second, again = (call("generate", "--prompt", "Once", *DRAWN, "--seed", seed)[1] for seed in "121")
    assert first == again != second


def test_any_option_of_drawing_is_enough():
    def read(*arguments: str) -> dict[str, Any]:
        return drawing(generate.make_parser().parse_args(["--model", "m", *arguments]))

    assert read() == {}
    assert read("--seed", "7") == {"key": jax.random.key(7)}
    assert read("--min-p", "0.1", "--top-p", "0.5") == {"min_p": 0.1, "top_p": 0.5, "key": jax.random.key(0)}


def test_stop_strings_that_cannot_be_are_wrong_usage(call):
    for command, arguments in (("generate", ["--prompt", "a"]), ("chat", [])):
        for stop, message in (
            ("", "--stop: expected at least one character"),
            ("</s>", "--stop: expected a text, got"),
        ):
            status, out, err = call(command, *arguments, "--stop", stop)
            assert (status, out, len(err)) == (2, "", 1)
            assert message in err[0]


# lsjax chat.


@pytest.fixture
def chat(call, monkeypatch):
    """Runs ``lsjax chat`` on some lines of standard input."""

    def run(lines: list[str], *arguments: str, **options: Any) -> tuple[int, str, list[str]]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return call("chat", *arguments, **options)

    return run


def answers(generator, *said: str, **options: Any) -> list[str]:
    """What the model answers to each message in turn, every conversation read anew."""
    return answers_alone(generator, list(said), NEW, **options)


def test_a_conversation(chat, generator):
    status, out, err = chat(["Hello", "", "And now?"], "--system", "Be brief.", "--exit-layer", "1")
    assert status == 0
    assert out.splitlines() == answers(generator, "Hello", "And now?", system="Be brief.")
    turns = [
        re.fullmatch(r"\(self_speculative: (\d+) .* accepted; read (\d+) .* kept (\d+), (\d+) of 128 .*\)", line)
        for line in err
    ]
    assert [turn is not None for turn in turns] == [True, True]
    (first, second) = ([int(part) for part in turn.groups()] for turn in turns if turn)
    assert first[:1] + first[2:] == [NEW, 0, first[1] + NEW]
    assert second[2] == first[3]
    assert second[3] == second[1] + second[2] + NEW


def test_reset_exit_and_other_commands(chat, generator):
    lines = ["Hello", "/reset", "Hello", "/nonsense", "/exit", "never said"]
    status, out, err = chat(lines, "--system", "Be brief.")
    (first,) = answers(generator, "Hello", system="Be brief.")
    assert (status, out) == (0, f"{first}\n{first}\n")
    assert err[1] == "(all forgotten but the system message)"
    assert err[3] == "(unknown command /nonsense: there are /reset and /exit)"
    assert len(err) == 4


def test_stop_strings_and_seeds_in_a_chat(chat, generator):
    (whole,) = answers(generator, "Hello")
    _, out, _ = chat(["Hello"], "--stop", whole[4])
    assert out == whole[: whole.index(whole[4])] + "\n"
    _, out, _ = chat(["Hello", "More"], *DRAWN, "--seed", "3")
    expected = answers(generator, "Hello", "More", key=jax.random.key(3), **DRAWING)
    assert out.splitlines() == expected


def test_a_full_conversation(chat, generator):
    (first,) = answers(generator, "Hello")
    status, out, err = chat(["Hello", "a long message", "/reset", "Hello"], "--capacity", "48")
    assert (status, out) == (0, f"{first}\n{first}\n")
    assert re.search(r"the conversation is full: .* 48 is its capacity.*: /reset begins a new one", err[1])
    _, _, err = chat(["Hello"], "--capacity", "30")
    assert err[1] == "(the conversation is full: /reset begins a new one)"


def test_an_interrupt_ends_the_answer_and_not_the_program(chat, generator, monkeypatch):
    show, pieces = repl.Display.show, []

    def interrupted(self, piece):
        show(self, piece)
        pieces.append(piece.text)
        if len(pieces) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(repl.Display, "show", interrupted)
    before = signal.getsignal(signal.SIGINT)
    status, out, err = chat(["Hello", "Go on"])
    cut = "".join(pieces[:2])
    (whole,) = answers(generator, "Hello")
    assert whole.startswith(cut)
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": cut}]
    second = answer_alone(generator, [*messages, {"role": "user", "content": "Go on"}], NEW)
    assert (status, out) == (0, f"{cut}\n{second}\n")
    assert err[0].startswith("(autoregressive: 2 new tokens")
    assert signal.getsignal(signal.SIGINT) == before


def test_an_interrupt_while_a_message_is_read_forgets_the_message(chat, generator, monkeypatch):
    prefill, calls = conversation.prefill, []

    def interrupted(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return prefill(*args, **options)

    monkeypatch.setattr(conversation, "prefill", interrupted)
    with handled(signal.default_int_handler, signal.SIGINT):  # which a process in the background does not have
        status, out, err = chat(["Hello", "Never mind", "Go on"])
    assert (status, out.splitlines()) == (0, answers(generator, "Hello", "Go on"))
    assert err[1] == "(interrupted: the message is forgotten)"
    assert "kept 0," in err[2]  # what the state held was lost with it


def test_lines_that_are_no_text(call, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"Gr\xfc\xdf Gott\n"), "utf-8"))
    status, out, err = call("chat")
    assert (status, out) == (2, "")
    assert err[-1].startswith("lsjax chat: error: standard input: 'utf-8' codec can't decode byte 0xfc")


def test_a_terminal_that_has_not_all_characters(monkeypatch):
    terminal = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, "ascii"))
    monkeypatch.setattr(sys, "argv", ["lsjax", "chat", "--help"])
    monkeypatch.setattr(lsjax.cli, "keep_compiled_programs", lambda: None)
    with pytest.raises(SystemExit):
        lsjax.cli.main()
    print("Grüß")
    sys.stdout.flush()
    assert terminal.getvalue().endswith(b"Gr\\xfc\\xdf\n")


def test_at_a_terminal(call, generator, monkeypatch):
    """A prompt; Ctrl-C there gives a new one, Ctrl-D leaves."""
    no_text = UnicodeDecodeError("utf-8", b"caf\xff", 3, 4, "invalid start byte")
    typed = iter(["Hello", KeyboardInterrupt, "/reset", "caf\udcff", no_text, EOFError])
    prompts = []

    def read(prompt: str) -> str:
        prompts.append(prompt)
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(builtins, "input", read)
    status, out, err = call("chat")
    (first,) = answers(generator, "Hello")
    assert (status, out) == (0, f"{first}\n\n\n")
    assert prompts == ["> "] * 6
    assert (
        err[0] == "(a line is a message; /reset forgets what was said, /exit or Ctrl-D leaves, Ctrl-C ends an answer)"
    )
    assert err[2:] == [
        "(all forgotten)",
        r"(messages: expected Unicode text, got the lone surrogate in 'caf\udcff')",
        "('utf-8' codec can't decode byte 0xff in position 3: invalid start byte)",
    ]


def test_models_that_cannot_chat(chat, model, tmp_path):
    bare = shutil.copytree(model, tmp_path / "bare")
    (bare / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    for source, arguments, message in (
        (str(bare), [], "chat: expected a tokenizer with a chat template"),
        (str(tmp_path / "absent"), [], "no such file or directory"),
        (model, ["--exit-layer", "3"], "expected a layer in 1..2, got 3"),
        (model, ["--strategy", "early_exit"], "--strategy early_exit needs --exit-layer E"),
        (model, ["--capacity", "1"], "at least 2, got '1'"),
    ):
        status, out, err = chat(["Hello"], *arguments, source=source)
        assert (status, out, len(err)) == (2, "", 1)
        assert err[0].startswith("lsjax chat: error: ")
        assert message in err[0]
