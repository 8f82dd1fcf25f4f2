"""Chats that keep their decode state between turns."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from chats import answer_alone
from checkpoints import model_config
from support import counted_compilations, random_params
from vocabularies import byte_level

import lsjax
from lsjax.text.conversation import Conversation, ConversationFullError
from lsjax.text.generator import TextGenerator

pytestmark = pytest.mark.usefixtures("fewer_optimizations")

CHAT = "{% for turn in messages %}<s>{{ turn.role }}:{{ turn.content }}</s>{% endfor %}<s>assistant:"
OPTIONS: dict[str, Any] = {"exit_layer": 1, "num_speculations": 3, "max_new_tokens": 12, "capacity": 192}


@pytest.fixture(scope="module")
def generator():
    """A model that writes text of single-byte characters, so that its answers are encoded as they were written."""
    config = model_config(vocab_size=258, num_hidden_layers=2, eos_token_id=257, bos_token_id=256)
    params = random_params(config, 3, deep_from=1, deep_scale=0.3)
    head = np.array(params.tree["lm_head"]["kernel"])
    head[:, :32] = head[:, 127:] = 0
    params.tree["lm_head"]["kernel"] = jax.numpy.asarray(head)
    return TextGenerator(lsjax.prepare(params), byte_level(chat_template=CHAT))


def say(conversation: Conversation, text: str) -> str:
    return "".join(piece.text for piece in conversation.ask(text))


def alone(generator, messages, **options) -> str:
    """What the model answers to the whole chat as one prompt, without drafts."""
    return answer_alone(generator, messages, OPTIONS["max_new_tokens"], **options)


def test_each_turn_answers_the_whole_conversation(generator):
    conversation = Conversation(generator, system="Be brief.", **OPTIONS)
    messages = [{"role": "system", "content": "Be brief."}]
    for turn, text in enumerate(["Hello", "And now?", "x", "Bye"]):
        messages.append({"role": "user", "content": text})
        before = conversation.length
        answer = say(conversation, text)
        assert answer == alone(generator, messages)
        assert len(answer) > 3
        messages.append({"role": "assistant", "content": answer})
        assert conversation.messages == messages
        assert conversation.kept == before  # all that was said; the message and what stands around it are read
        if turn:
            assert conversation.read == 2 + len("user:") + len(text) + 2 + len("assistant:")


def test_what_a_template_changes_is_read_again(generator):
    """This one leaves out all answers but the last, and counts the turns in front."""
    template = "<s>{{ messages | length }} {% for turn in messages[-3:] %}{{ turn.content }}\n{% endfor %}"
    other = TextGenerator(generator.params, byte_level(chat_template=template))
    conversation = Conversation(other, **OPTIONS)
    messages: list[dict[str, str]] = []
    for text in ("Hello", "And now?", "x"):
        messages.append({"role": "user", "content": text})
        answer = say(conversation, text)
        assert answer == alone(other, messages)
        messages.append({"role": "assistant", "content": answer})
        assert conversation.kept == (1 if text != "Hello" else 0)


def test_the_same_words_again_are_all_kept_but_one(generator):
    """A template that forgets what was said: the state has it all, and the last token is read again."""
    forgetful = TextGenerator(generator.params, byte_level(chat_template="<s>{{ messages[-1].content }}"))
    conversation = Conversation(forgetful, **OPTIONS)
    first = say(conversation, "Hello")
    assert say(conversation, "Hello") == first
    assert (conversation.kept, conversation.read) == (5, 1)


def test_no_turn_compiles_what_an_earlier_one_did(generator):
    """The third turn's prompt is of the second's width."""
    conversation = Conversation(generator, **OPTIONS)
    for text in ("Hello", "And now?"):
        say(conversation, text)
    with counted_compilations() as compiled:
        for text in ("So what", "I see."):
            say(conversation, text)
    assert compiled == []
    with counted_compilations() as compiled:
        conversation.reset()
        for text in ("Howdy", "And then"):
            say(conversation, text)
    assert compiled == []


def test_an_answer_that_is_ended_is_part_of_the_conversation(generator):
    conversation = Conversation(generator, **OPTIONS)
    whole = alone(generator, [{"role": "user", "content": "Hello"}])
    answer = conversation.ask("Hello")
    part = next(answer).text
    answer.stop()
    part += "".join(piece.text for piece in answer)
    assert whole.startswith(part)
    assert len(part) < len(whole)
    other = Conversation(generator, **OPTIONS)
    left = next(other.ask("Hello")).text  # and the next turn comes
    for chat, said in ((conversation, part), (other, left)):
        messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": said}]
        messages += [{"role": "user", "content": "Go on"}]
        assert say(chat, "Go on") == alone(generator, messages)
        assert chat.messages[:3] == messages


def test_stop_strings_end_answers(generator):
    whole = alone(generator, [{"role": "user", "content": "Hello"}])
    conversation = Conversation(generator, stop=whole[4], **OPTIONS)
    cut = whole[: whole.index(whole[4])]
    assert say(conversation, "Hello") == cut
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": cut}]
    messages += [{"role": "user", "content": "More"}]
    more = alone(generator, messages)
    assert say(conversation, "More") == more.partition(whole[4])[0]


def test_statistics_are_each_turns_own(generator):
    conversation = Conversation(generator, **OPTIONS)
    for text in ("Hello", "And now?"):
        answer = conversation.ask(text)
        list(answer)
        stats = answer.result.stats
        assert int(stats.new_tokens) == len(answer.result.tokens)
        assert int(stats.accept_histogram.sum()) == int(stats.rounds) > 0


@pytest.mark.slow
def test_sampled_answers_are_those_of_the_whole_prompt(generator):
    """Draws are keyed by position, so what was read when changes nothing."""
    options = {"key": jax.random.key(4), "temperature": 0.9}
    conversation = Conversation(generator, **OPTIONS, **options)
    messages: list[dict[str, str]] = []
    for text in ("Hello", "And now?"):
        messages.append({"role": "user", "content": text})
        answer = say(conversation, text)
        assert answer == generator.generate(messages, **OPTIONS, **options).text  # with drafts, which draws depend on
        messages.append({"role": "assistant", "content": answer})


def test_a_full_conversation_says_so_and_can_begin_anew(generator):
    conversation = Conversation(generator, **{**OPTIONS, "capacity": 64})
    first = say(conversation, "Hello")
    said, length = conversation.messages, conversation.length
    with pytest.raises(ConversationFullError, match=r"is full: with this message it has \d+ tokens, and 64 is"):
        conversation.ask("a message that is too long for it, by far")
    assert (conversation.messages, conversation.length) == (said, length)
    short = conversation.ask("x")  # there is still room for this one
    list(short)
    assert 0 < len(short.result.tokens) <= 12
    conversation.reset()
    assert (conversation.messages, conversation.length) == ([], 0)
    assert say(conversation, "Hello") == first


def test_room_for_a_part_of_an_answer(generator):
    prompt = len(generator.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], return_dict=False))
    conversation = Conversation(generator, **{**OPTIONS, "capacity": prompt + 5})
    answer = conversation.ask("Hello")
    list(answer)
    assert (len(answer.result.tokens), answer.result.finish_reason) == (5, "length")
    assert conversation.length == conversation.capacity


def test_bad_options_are_refused_at_once(generator):
    for options, message in [
        ({"capacity": 1}, "capacity: expected an int of at least 2, got 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an int of at least 1, got 0"),
        ({"stop": ""}, "stop: expected at least one character"),
    ]:
        with pytest.raises(ValueError, match=message):
            Conversation(generator, **OPTIONS | options)
    with pytest.raises(ValueError, match="chat: expected a tokenizer with a chat template"):
        Conversation(TextGenerator(generator.params, byte_level()), **OPTIONS)
