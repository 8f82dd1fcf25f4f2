"""Text of tokens one by one: whole characters, stop strings wherever they fall, as decoding the whole gives it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vocabularies import byte_level, sentencepiece

from lsjax.text.detokenizer import Detokenizer
from lsjax.text.growing import GrowingText
from lsjax.text.stopping import Match, StopStrings, read_stops

EMOJI = "😀".encode()
# Tokens that cut characters anywhere, and words with and without a space in front.
PIECES = (b"Paris", b" Paris", b" is", b".\n", b"\n\n", b" \xf0\x9f", b"\x98\x80!", b"\xa9t\xc3\xa9")


@pytest.fixture(scope="module")
def level():
    return byte_level(*PIECES)


@pytest.fixture(scope="module")
def piece():
    return sentencepiece("▁Paris", "Paris", "▁is", "▁", ".", "▁▁", "Pa", "ris", "é", "▁</")


def ids(tokenizer, *tokens: str | bytes) -> list[int]:
    """Ids by name; of bytes that are no token, those of the single bytes."""
    found: list[int] = []
    for token in tokens:
        if isinstance(token, str):
            found.append(tokenizer.convert_tokens_to_ids(token))
        elif token in PIECES:
            found.append(256 + PIECES.index(token))
        else:
            found += token
    return found


def whole(tokenizer, context: list[int], tokens: list[int]) -> str:
    """What the tokenizer makes of all tokens after the context."""
    decode: Any = tokenizer.decode
    before, both = (decode(part, skip_special_tokens=True) for part in (context, context + tokens))
    return both[len(before) :]


def pieces(tokenizer, tokens: list[int], context: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context or [])
    return [*(detokenizer.push(token) for token in tokens), detokenizer.finish()]


def test_characters_of_several_tokens_come_whole(level, piece):
    for tokenizer in (level, piece):
        assert pieces(tokenizer, list(b"a" + EMOJI + b"b")) == ["a", "", "", "", "😀", "b", ""]
    # A token that ends one character and begins the next gives what is complete.
    assert pieces(level, ids(level, b" \xf0\x9f", b"\x98", b"\x80", b"\xc3", b"\xa9t\xc3\xa9")) == [
        *(" ", "", "😀", "", "été"[:3]),
        "",
    ]
    # A text that ends within one: as decoding shows it.
    assert pieces(level, ids(level, b"a", EMOJI[:3])) == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]


def test_a_space_in_front_depends_on_what_stands_before(piece):
    paris, is_ = ids(piece, "▁Paris", "▁is")
    assert pieces(piece, [paris, is_]) == ["Paris", " is", ""]
    assert pieces(piece, [paris, is_], context=[is_]) == [" Paris", " is", ""]
    special = piece.bos_token_id
    assert pieces(piece, [special, paris, special, is_]) == ["", "Paris", "", " is", ""]
    assert pieces(piece, [paris], context=[is_, special]) == [" Paris", ""]


def test_special_tokens_have_no_text(level):
    tokens = [*b"a", level.eos_token_id, *EMOJI[:2], level.bos_token_id, *EMOJI[2:]]
    assert "".join(pieces(level, tokens)) == whole(level, [], tokens) == "a😀"


def complete_texts(tokenizer, context: list[int], tokens: list[int]) -> list[str]:
    """The complete characters of each beginning of the tokens.

    Of byte tokens in a row SentencePiece's decoder shows none while the last ones are no character yet, also not those
    that it showed before; these stay.
    """
    found = [""]
    for count in range(1, len(tokens) + 1):
        text = whole(tokenizer, context, tokens[:count]).rstrip("\N{REPLACEMENT CHARACTER}")
        found.append(text if len(text) > len(found[-1]) else found[-1])
    return found[1:]


def valid_text(rng: random.Random, most: int = 120) -> bytes:
    letters = "abcPris .\n</é😀한"
    return "".join(rng.choice(letters) for _ in range(rng.randrange(most))).encode()


def cut_by(tokenizer, text: bytes, rng: random.Random) -> list[int]:
    """Some way to write a text with the tokens that there are, special ones thrown in."""
    words = {bytes([byte]): byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(PIECES)}
    if tokenizer.convert_tokens_to_ids("▁Paris") is not None:  # in SentencePiece's manner
        words = {bytes([byte]): byte for byte in range(256)}
        for word, index in tokenizer.get_vocab().items():
            if not word.startswith("<") and index >= 256:
                words[word.replace("▁", " ").encode()] = index
    found, at = [], 0
    while at < len(text):
        fitting = [word for word in words if text.startswith(word, at)]
        word = max(fitting, key=len) if rng.random() < 0.6 else rng.choice(fitting)
        found.append(words[word])
        at += len(word)
        if rng.random() < 0.03:
            found.append(tokenizer.eos_token_id)
    return found


@pytest.mark.parametrize("manner", ["level", "piece"])
def test_all_pieces_are_what_decoding_the_whole_gives(manner, request):
    """Random texts in random tokens, after random contexts; each prefix of complete characters is given at once."""
    tokenizer, rng = request.getfixturevalue(manner), random.Random(0)
    for _ in range(150):
        context, tokens = (cut_by(tokenizer, valid_text(rng), rng) for _ in range(2))
        detokenizer, given = Detokenizer(tokenizer, context), ""
        for token, expected in zip(tokens, complete_texts(tokenizer, context, tokens), strict=True):
            given += detokenizer.push(token)
            assert given == expected
        assert given + detokenizer.finish() == whole(tokenizer, context, tokens)


def test_bytes_that_are_no_text_are_shown_as_decoding_shows_them(level):
    """Random bytes, as a random model writes them."""
    rng = random.Random(1)
    for _ in range(100):
        tokens = [rng.randrange(266) for _ in range(100)]
        assert "".join(pieces(level, tokens)) == whole(level, [], tokens)


def test_what_is_decoded_again_stays_short(level):
    """The time for a token does not grow with the text."""
    sizes: list[int] = []

    class Counting:
        def decode(self, tokens: list[int], **options: Any) -> str:
            sizes.append(len(tokens))
            return level.decode(tokens, **options)

    detokenizer = Detokenizer(Counting(), list(b"a long prompt " * 40))
    for token in b"and its answer " * 40:
        detokenizer.push(token)
    assert max(sizes[4:]) <= 40
    assert len(sizes) < 700


# Stop strings.


def test_finding():
    stops = StopStrings(["b", "abc", "ab", "b"])
    assert stops.find("xxab") == Match(2, 4, "ab")
    assert stops.find("xabcab") == Match(1, 4, "abc")  # the longest of those that begin there
    assert stops.find("xabcab", 2) == Match(2, 3, "b")
    assert stops.find("xa") is None
    assert StopStrings().find("abc") is None
    assert [stops.held(text) for text in ("", "x", "xa", "ab", "aba")] == [0, 0, 1, 2, 1]
    assert StopStrings(["aab"]).held("xaaa") == 2


def grown(tokenizer, tokens, stops, context=(), **options) -> GrowingText:
    text = GrowingText(tokenizer, context, StopStrings(stops), **options)
    for token in tokens:
        if text.push(token):
            break
    else:
        text.finish()
    return text


def test_a_stop_string_inside_a_token(level, piece):
    text = grown(level, ids(level, b" Paris", b" is"), ["ari"])
    assert (text.text, text.tokens, text.stop) == (" P", ids(level, b" Paris"), "ari")
    text = grown(piece, ids(piece, "▁is", "▁Paris", "▁is"), [" Pari"])
    assert (text.text, text.tokens, text.stop) == ("is", ids(piece, "▁is", "▁Paris"), " Pari")


def test_a_stop_string_over_tokens(level):
    tokens = ids(level, b"The end", b".\n", b"\n\n", b"more")
    text = grown(level, tokens, ["end.\n\n"])
    assert (text.text, text.stop, text.tokens) == ("The ", "end.\n\n", tokens[:9])
    text = grown(level, tokens, ["end.\n\n"], include_stop=True)
    assert (text.text, text.stop, text.tokens) == ("The end.\n\n", "end.\n\n", tokens[:9])


def test_a_stop_string_in_the_prompt_does_not_count(level):
    text = grown(level, list(b"b and ab"), ["ab"], context=list(b"ab a"))
    assert (text.text, text.tokens) == ("b and ", list(b"b and ab"))


def test_an_emoji_stops(level):
    tokens = [*b"so ", *EMOJI, *b" on"]
    text = grown(level, tokens, ["😀"])
    assert (text.text, text.tokens) == ("so ", tokens[:7])


def test_one_token_that_completes_several(level):
    text = grown(level, ids(level, b" Paris"), ["is", "a", "ari"])
    assert (text.text, text.stop) == (" P", "ari")
    assert grown(level, list(b"Paris"), ["is", "ari", "a"]).stop == "a"


def test_nothing_after_the_end_changes_anything(level):
    text = grown(level, list(b"one two"), [" "])
    assert text.push(65)
    text.finish()
    assert (text.text, text.tokens) == ("one", list(b"one "))


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("manner", ["level", "piece"])
def test_the_shortest_beginning_whose_text_holds_a_stop_string(manner, include_stop, request):
    """Against the definition, by decoding every beginning: random texts, contexts and stop strings."""
    tokenizer, rng = request.getfixturevalue(manner), random.Random(2)
    fired = 0
    for _ in range(200):
        context, tokens = (cut_by(tokenizer, valid_text(rng, 30), rng) for _ in range(2))
        sample = valid_text(rng).decode() + whole(tokenizer, context, tokens)
        spans = [(rng.randrange(len(sample)), rng.randrange(1, 6)) for _ in range(3)] if sample else []
        stops = [sample[at : at + size] for at, size in spans]
        expected, count, stop = whole(tokenizer, context, tokens), len(tokens), None
        for length, text in enumerate(complete_texts(tokenizer, context, tokens), start=1):
            at = min((text.index(stop) for stop in stops if stop in text), default=None)
            if at is not None:
                stop = max((stop for stop in stops if text.startswith(stop, at)), key=len)
                expected, count = text[: at + len(stop) * include_stop], length
                break
        text = GrowingText(tokenizer, context, StopStrings(stops), include_stop=include_stop)
        shown = ""
        for token in tokens:
            ended = text.push(token)
            shown += "".join(part for part, _ in text.take())
            assert expected.startswith(shown)  # nothing is taken back
            if ended:
                break
        text.finish()
        shown += "".join(part for part, _ in text.take())
        assert (text.text, text.stop, len(text.tokens)) == (expected, stop, count)
        assert shown == expected
        fired += stop is not None
    assert 40 < fired < 190


def test_text_is_given_out_when_it_can_be(level):
    """All but what may begin a stop string, at once."""
    text = GrowingText(level, [], StopStrings(["<end>", "\n\n"]))
    taken = []
    for token in b"a<en<end":
        text.push(token)
        taken.append("".join(part for part, _ in text.take()))
    assert taken == ["a", "", "", "", "<en", "", "", ""]
    text.finish()
    assert text.take() == (("<end", False),)
    assert text.take() == ()


def test_runs_say_what_drafts_wrote(level):
    """A character counts for the token that completes it; what was held back keeps its origin."""
    text = GrowingText(level, [], StopStrings(["cd!"]))
    for token, drafted in zip([*b"ab", *EMOJI, *b"cd"], [True, False, *[False] * 3, True, True, False], strict=True):
        text.push(token, drafted)
    assert text.take() == (("a", True), ("b", False), ("😀", True))
    text.push(ord("e"), drafted=False)
    assert text.take() == (("c", True), ("de", False))


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ("", "stop: expected at least one character, got an empty string"),
        (["a", ""], "stop: expected at least one character, got an empty string"),
        (5, "stop: expected a string, or several of them, got 5"),
        (["a", b"b"], "stop: expected a string, or several of them, got b'b' among them"),
        ([["a"]], r"stop: expected a string, or several of them, got \['a'\] among them"),
        ("</s>", r"got the special token '</s>', which texts never hold: end at its id instead, eos_token_id=265"),
    ],
)
def test_bad_stop_strings_are_one_clear_error(level, stop, message):
    with pytest.raises(ValueError, match=message):
        read_stops(stop, level)


def test_stop_strings_as_callers_give_them(level):
    assert read_stops(None, level).stops == read_stops([], level).stops == ()
    assert read_stops("ab", level).stops == ("ab",)
    assert read_stops(iter(("a", "b", "a")), level).stops == ("a", "b")
