"""Tokenizers of GGUF files and directories, against transformers and against byte-pair merging written out here."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import gguf_metadata, gguf_tensors, random_model, write_gguf, write_plain

from lsjax.convert import gguf as gguf_format
from lsjax.convert.checkpoint import CheckpointError
from lsjax.io import save
from lsjax.sources import locate
from lsjax.text.tokenizer import load_tokenizer

pytest.importorskip("gguf")
regex = pytest.importorskip("regex")

# Prose, accents, scripts, emoji, numbers of every kind, code, chat markup, white space, control characters.
SINGLE = json.loads(Path(__file__).with_name("tokenizer_strings.json").read_text(encoding="utf-8"))
STRINGS = list(dict.fromkeys(["", *SINGLE, *(a + b for a, b in zip(SINGLE, SINGLE[7:], strict=False))]))
assert len(STRINGS) >= 200

CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?\n"}],
    [
        {"role": "user", "content": "Ünïcode 😀"},
        {"role": "assistant", "content": "Yes <|im_end|> 12"},
        {"role": "user", "content": "  "},
    ],
]

# GPT-2's splitting pattern, from its paper's reference code.
GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def merge(word: list[str], ranks: dict) -> list[str]:
    """Byte-pair merging: the earliest learned pair first, its leftmost occurrence first (arXiv 1508.07909)."""
    while True:
        pairs = [(ranks.get(pair, len(ranks)), i) for i, pair in enumerate(itertools.pairwise(word))]
        rank, i = min(pairs, default=(len(ranks), 0))
        if rank == len(ranks):
            return word
        word = [*word[:i], word[i] + word[i + 1], *word[i + 2 :]]


class WrittenOut:
    """SmolLM2's tokenizer: control tokens whole, each digit alone, GPT-2's pattern, byte-pair merges."""

    def __init__(self, path) -> None:
        metadata = gguf_format.read_metadata(path)
        tokens = metadata["tokenizer.ggml.tokens"]
        self.ids = {token: i for i, token in enumerate(tokens)}
        pairs = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        self.ranks = {pair: rank for rank, pair in enumerate(pairs)}
        self.control = [t for t, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3]
        self.letters = byte_letters()

    def __call__(self, text: str) -> list[int]:
        found = []
        for part in regex.split("(" + "|".join(map(regex.escape, self.control)) + ")", text):
            if part in self.control:
                found.append(self.ids[part])
                continue
            for piece in regex.split(r"(\p{N})", part):
                for word in GPT2.findall(piece):
                    letters = [self.letters[byte] for byte in word.encode()]
                    found += [self.ids[token] for token in merge(letters, self.ranks)]
        return found


@pytest.fixture(scope="module")
def demo():
    return load_tokenizer("demo")


@pytest.fixture(scope="module")
def written_out():
    return WrittenOut(locate("demo"))


@pytest.fixture(scope="module")
def transformers_own():
    """transformers' reading of the same file."""
    pytest.importorskip("torch")
    from transformers import AutoTokenizer

    path = locate("demo")
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.demo
def test_the_demos_ids_equal_the_algorithm_written_out(demo, written_out):
    for text in STRINGS:
        assert demo(text).input_ids == written_out(text), repr(text)


@pytest.mark.demo
def test_the_demos_ids_equal_transformers(demo, transformers_own):
    """transformers 5.24 reads "smollm" as GPT-2's plain splitting; SmolLM2's own files put each digit alone first."""
    from tokenizers import pre_tokenizers

    plain = [text for text in STRINGS if not regex.search(r"\p{N}", text)]
    assert len(plain) > 120
    for text in plain:
        assert demo(text).input_ids == transformers_own(text).input_ids, repr(text)
    inner = transformers_own.backend_tokenizer
    if "Digits" not in repr(inner.pre_tokenizer):
        assert any(demo(text).input_ids != transformers_own(text).input_ids for text in STRINGS)
        inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), inner.pre_tokenizer])
    for text in STRINGS:
        ids = demo(text).input_ids
        assert ids == transformers_own(text).input_ids, repr(text)
        for skip in (False, True):
            assert demo.decode(ids, skip_special_tokens=skip) == transformers_own.decode(ids, skip_special_tokens=skip)


@pytest.mark.demo
def test_the_demos_text_comes_back(demo):
    for text in STRINGS:
        assert demo.decode(demo(text).input_ids) == text


@pytest.mark.demo
def test_the_demos_chat_template_is_applied_as_transformers_does(demo, transformers_own):
    for chat in CHATS:
        for prompt in (False, True):
            text = demo.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            expected = transformers_own.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert text == expected
            assert text.endswith("assistant\n") == prompt
            ids = demo.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
            assert ids == demo(text).input_ids
    first = demo.apply_chat_template(CHATS[0], tokenize=False)
    assert first.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face")


@pytest.mark.demo
def test_the_demos_special_tokens(demo):
    names = ("bos", "eos", "pad", "unk")
    found = [(getattr(demo, f"{name}_token"), getattr(demo, f"{name}_token_id")) for name in names]
    assert found == [("<|im_start|>", 1), ("<|im_end|>", 2), ("<|im_end|>", 2), ("<|endoftext|>", 0)]
    assert (len(demo), demo.model_max_length) == (49152, 8192)
    batch = demo(["a", "a b c d"], padding=True)
    assert batch.attention_mask == [[1, 0, 0, 0], [1, 1, 1, 1]]
    assert batch.input_ids[0][1:] == [2, 2, 2]


# A small vocabulary for files made here: the bytes, two merges, a control token and a user-defined one.
TOKENS = [*byte_letters(), "Ġa", "ab", "<s>", "<think>"]
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 258 + [3, 4],
    "tokenizer.ggml.merges": ["Ġ a", "a b"],
    "tokenizer.ggml.bos_token_id": 258,
    "tokenizer.ggml.eos_token_id": 258,
}


def vocabulary_file(path, **changes):
    params = random_model(1, num_hidden_layers=1, vocab_size=len(TOKENS))
    write_gguf(path, gguf_metadata(params.config, **(VOCABULARY | changes)), gguf_tensors(params))
    return path


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path):
    tokenizer = load_tokenizer(vocabulary_file(tmp_path / "a.gguf"))
    ids = tokenizer("ab a1<s><think>\n").input_ids
    assert [TOKENS[i] for i in ids] == ["ab", "Ġa", "1", "<s>", "<think>", "Ċ"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab a1<think>\n"


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_bos_and_eos_are_added_where_the_file_says_so(bos, eos, tmp_path):
    adds = {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    tokenizer = load_tokenizer(vocabulary_file(tmp_path / "a.gguf", **adds))
    assert tokenizer("a").input_ids == [258] * bos + [TOKENS.index("a")] + [258] * eos
    assert tokenizer("a", add_special_tokens=False).input_ids == [TOKENS.index("a")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre: expected one of gpt-2, .*smollm, got 'tekken'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre: expected one of .*smollm, got None"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model: expected 'gpt2'.* or 'llama'.*, got 't5'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.pre: expected one of default, got 'smollm'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores: expected 260 finite numbers"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens: expected different tokens, got 0 among 0"),
        ({"tokenizer.ggml.tokens": ["a"] * 260}, "tokenizer.ggml.tokens: expected different tokens, got 1 among 260"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type: expected 260 entries, got 1"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "tokenizer.ggml.merges: expected pairs of tokens"),
        ({"tokenizer.ggml.merges": ["a zz"]}, "tokenizer.ggml.merges: .*zz"),
        ({"tokenizer.ggml.eos_token_id": 260}, r"tokenizer.ggml.eos_token_id: expected an id in 0\.\.259, got 260"),
    ],
)
def test_a_vocabulary_that_lsjax_cannot_use_is_refused_by_name(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(vocabulary_file(tmp_path / "a.gguf", **changes))


# Llama 3's pattern, spelled without the flag inside it.
LLAMA3 = regex.compile(
    r"'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MERGES = ["Ġ a", "a b", "t h", "th e", "Ġ the", "1 2", "12 3", "4 5", "' l", "'l l", "Ċ Ċ", "Ġ Ġ", "e r", "i n", "Ã ©"]
WORDS = [merge.replace(" ", "") for merge in MERGES]


@pytest.mark.parametrize(("pre", "pattern"), [("gpt-2", GPT2), ("llama-bpe", LLAMA3), ("smaug-bpe", LLAMA3)])
def test_byte_level_vocabularies_split_and_merge_as_written_out(pre, pattern, tmp_path):
    tokens = [*byte_letters(), *WORDS, "Ġinter", "<|begin|>"]  # "Ġinter" is a token that no merge makes
    changes = {"tokens": tokens, "token_type": [1] * (len(tokens) - 1) + [3], "merges": MERGES, "pre": pre}
    changes |= {"bos_token_id": len(tokens) - 1, "eos_token_id": len(tokens) - 1}
    path = vocabulary_file(tmp_path / "a.gguf", **{f"tokenizer.ggml.{name}": value for name, value in changes.items()})
    tokenizer = load_tokenizer(path)
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(MERGES)}
    letters = byte_letters()
    for text in (*STRINGS, "the inter inn 12345 I'LL\n\n  é"):
        expected = []
        for word in pattern.findall(text):
            spelled = [letters[byte] for byte in word.encode()]
            whole = pre == "llama-bpe" and "".join(spelled) in tokens
            expected += ["".join(spelled)] if whole else merge(spelled, ranks)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert [tokens[i] for i in ids] == expected, repr(text)
        assert tokenizer.decode(ids) == text
    begins = [len(tokens) - 1] if pre == "llama-bpe" else []
    assert tokenizer("a").input_ids == [*begins, tokens.index("a")]


def sentencepiece_tokens():
    """A small vocabulary as Llama 2's: unknown and control tokens, bytes, pieces by score, runs of spaces alike."""
    pieces = ["▁t", "he", "▁the", "in", "▁a", "er", "aa", "aaa", "▁in", "ing", "ab", "ba", "aba"]
    runs = ["▁" * size for size in (2, 4, 8, 3)]
    letters = list("▁abcdefghijklmnopqrstuvwxyzTI.,'é")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *runs, *letters, "<mark>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(pieces + runs + letters), 4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-1e9] * len(runs)
    return tokens, kinds, scores + [-100.0 - i for i in range(len(letters))] + [0.0]


def sentencepiece_file(path, **changes):
    tokens, kinds, scores = sentencepiece_tokens()
    entries = {"model": "llama", "pre": "default", "merges": None, "tokens": tokens, "token_type": kinds}
    entries |= {"scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return vocabulary_file(path, **{f"tokenizer.ggml.{name}": value for name, value in (entries | changes).items()})


def merge_by_score(word: list[str], scores: dict) -> list[str]:
    """SentencePiece's BPE: the pair whose union scores best first, its leftmost occurrence first."""
    while True:
        unions = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(word)) if a + b in scores]
        if not unions:
            return word
        _, i = min(unions)
        word = [*word[:i], word[i] + word[i + 1], *word[i + 2 :]]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabularies_merge_by_score_as_written_out(prefix, tmp_path):
    tokens, kinds, scores = sentencepiece_tokens()
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path / "a.gguf", add_space_prefix=prefix))
    ids = {token: i for i, token in enumerate(tokens)}
    normal = {token: score for token, kind, score in zip(tokens, kinds, scores, strict=True) if kind == 1}
    strings = [text for text in STRINGS if "<s>" not in text and "</s>" not in text]
    for text in (*strings, "the  inner aaaaa ababa", *("a" + " " * size + "b" for size in range(20))):
        spelled = ("▁" * (prefix and text != "")) + text.replace(" ", "▁")
        expected = []
        for piece in merge_by_score(list(spelled), normal):
            expected += [ids[piece]] if piece in normal else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
        found = tokenizer(text).input_ids
        assert found == [1, *expected], repr(text)
        assert tokenizer.decode(found, skip_special_tokens=True) == text


def test_sentencepiece_text_after_a_special_token_begins_with_a_space_again(tmp_path):
    tokens, _, _ = sentencepiece_tokens()
    tokenizer = load_tokenizer(sentencepiece_file(tmp_path / "a.gguf", add_bos_token=False))
    assert [tokens[i] for i in tokenizer("a</s>the<mark>in").input_ids] == ["▁a", "</s>", "▁the", "<mark>", "▁in"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "tokenizer.ggml.scores: expected 310 finite numbers that rank the tokens, got 0"),
        ({"scores": [-1000.0] * 310}, "tokenizer.ggml.scores: expected 310 finite numbers that rank the tokens"),
        ({"scores": [float("nan")] * 310}, "tokenizer.ggml.scores: expected 310 finite"),
        ({"remove_extra_whitespaces": True}, "tokenizer.ggml.remove_extra_whitespaces is not supported"),
        ({"pre": "llama-bpe"}, "tokenizer.ggml.pre: expected one of default, got 'llama-bpe'"),
    ],
)
def test_a_sentencepiece_vocabulary_that_lsjax_cannot_use_is_refused_by_name(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(sentencepiece_file(tmp_path / "a.gguf", **changes))


def test_a_directory_has_transformers_tokenizer_or_says_that_it_has_none(tmp_path):
    params = random_model(1, num_hidden_layers=1)
    write_plain(tmp_path / "plain", params)
    save(params, tmp_path / "saved")
    for name in ("plain", "saved"):
        with pytest.raises(FileNotFoundError, match=r"holds no tokenizer: expected tokenizer\.json"):
            load_tokenizer(tmp_path / name)
        made = load_tokenizer(vocabulary_file(tmp_path / "a.gguf"))
        made.save_pretrained(tmp_path / name)
        again = load_tokenizer(tmp_path / name)
        for text in (*STRINGS, "<s><think>"):
            assert again(text).input_ids == made(text).input_ids, repr(text)


def test_importing_the_module_does_not_import_transformers():
    program = "import sys, lsjax.text.tokenizer; print('transformers' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
