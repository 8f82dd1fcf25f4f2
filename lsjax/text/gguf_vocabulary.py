"""Tokenizers built from a GGUF file's metadata: byte-level BPE, and SentencePiece's BPE (``tokenizer.ggml.model``)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from lsjax.convert import gguf
from lsjax.convert.checkpoint import CheckpointError

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerFast

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # in `tokenizer.ggml.token_type`
_SPACE = "▁"  # SentencePiece's

# Llama 3's pattern, from its tokenizer.json: contractions, words, up to three digits, signs, line ends, white space.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class _Splitting:
    """How a byte-level vocabulary treats text before its merges apply, by ``tokenizer.ggml.pre``.

    Attributes:
        make: what splits text into words.
        ignore_merges: whether a word that is a token is one, whatever the merges say.
        adds_bos: whether texts begin with BOS where the file does not say.
    """

    make: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    adds_bos: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits_alone() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_LLAMA3), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_SPLITTINGS = {
    "gpt-2": _Splitting(_gpt2),
    "llama-bpe": _Splitting(_llama3, ignore_merges=True, adds_bos=True),
    "smaug-bpe": _Splitting(_llama3),
    "smollm": _Splitting(_digits_alone),
}


def read_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a GGUF file.

    Raises:
        CheckpointError: a damaged file, or a vocabulary that lsjax does not know or cannot use, by name.
    """
    from transformers import PreTrainedTokenizerFast

    metadata = gguf.read_metadata(path)
    vocabulary = _read_vocabulary(metadata, path)
    tokenizer = _sentencepiece(vocabulary) if vocabulary.model == "llama" else _byte_level(vocabulary, path)
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        whole = [token for token, found in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if found == kind]
        add([AddedToken(token, special=kind == _CONTROL, normalized=False) for token in whole])
    before, after = ([vocabulary.special[name]] if name in vocabulary.added else [] for name in ("bos", "eos"))
    if before or after:
        ids = [(token, vocabulary.tokens.index(token)) for token in before + after]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=ids)
    longest = metadata.get("llama.context_length")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=longest if type(longest) is int and longest > 0 else None,
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in vocabulary.special.items()},
    )


@dataclasses.dataclass(frozen=True)
class _Vocabulary:
    """A vocabulary that lsjax can use; ``special``: bos, eos, unk, pad; ``added``: which texts begin or end with."""

    model: str
    pre: str
    tokens: list[str]
    kinds: list[int]
    merges: list[tuple[str, str]]
    scores: list[float]
    special: dict[str, str]
    added: set[str]
    space_prefix: bool


def _byte_level(vocabulary: _Vocabulary, path: Path) -> Tokenizer:
    splitting = _SPLITTINGS[vocabulary.pre]
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(ids, vocabulary.merges, ignore_merges=splitting.ignore_merges))
    except Exception as error:  # what the tokenizers package raises for a merge of unknown tokens
        raise CheckpointError(path, [f"tokenizer.ggml.merges: {error}"]) from error
    tokenizer.pre_tokenizer = splitting.make()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    """SentencePiece's BPE, which merges the pair whose union has the best score: as ranked merges (Llama 1 and 2).

    Characters without a token become their bytes' tokens. Between special tokens each text begins with a space where
    the file says so, as in llama.cpp.
    """
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    model = models.BPE(
        ids, _ranked_merges(vocabulary), unk_token=vocabulary.special.get("unk"), fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    prefix = [normalizers.Prepend(_SPACE)] if vocabulary.space_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.space_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _ranked_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every pair of tokens whose union is a token, best score first; of one union's, the longest left part first."""
    normal = {
        token: score
        for token, kind, score in zip(vocabulary.tokens, vocabulary.kinds, vocabulary.scores, strict=True)
        if kind == _NORMAL and token
    }
    sizes = sorted({len(token) for token in normal}, reverse=True)
    held = set(sizes)
    pairs = [
        (token[:size], token[size:])
        for token in sorted(normal, key=lambda token: -normal[token])
        for size in sizes
        if len(token) - size in held
    ]
    return [pair for pair in pairs if pair[0] in normal and pair[1] in normal]


def _read_vocabulary(metadata: Mapping[str, Any], path: Path) -> _Vocabulary:
    """What the metadata says of the vocabulary; one error names all that lsjax cannot use."""
    problems: list[str] = []

    def entry(name: str, kind: type, default: Any, item: type | None = None) -> Any:
        """An entry of this type (a list: of items of one type), or its default."""
        value = metadata.get(f"tokenizer.ggml.{name}")
        if value is None:
            return default
        if type(value) is kind and (item is None or all(type(one) is item for one in value)):
            return value
        wanted = kind.__name__ if item is None else f"an array of {item.__name__}"
        problems.append(f"tokenizer.ggml.{name}: expected {wanted}, got {_brief(value)}")
        return default

    model, pre = entry("model", str, None), entry("pre", str, None)
    scored = model == "llama"
    if model not in ("gpt2", "llama"):
        wanted = "'gpt2' (byte-level BPE) or 'llama' (SentencePiece)"
        problems.append(f"tokenizer.ggml.model: expected {wanted}, got {model!r}")
    known = ("default",) if scored else tuple(_SPLITTINGS)
    if pre not in known and not (scored and pre is None):
        problems.append(f"tokenizer.ggml.pre: expected one of {', '.join(known)}, got {pre!r}")
    tokens = entry("tokens", list, [], str)
    kinds = entry("token_type", list, [_NORMAL] * len(tokens), int)
    if not tokens or len(set(tokens)) < len(tokens):
        problems.append(f"tokenizer.ggml.tokens: expected different tokens, got {len(set(tokens))} among {len(tokens)}")
    if len(kinds) != len(tokens):
        problems.append(f"tokenizer.ggml.token_type: expected {len(tokens)} entries, got {len(kinds)}")
    scores = entry("scores", list, [], float) if scored else []
    if scored:
        ranks = len(set(scores)) > 1 and all(map(math.isfinite, scores))
        if len(scores) != len(tokens) or not ranks:
            wanted = f"{len(tokens)} finite numbers that rank the tokens"
            problems.append(f"tokenizer.ggml.scores: expected {wanted}, got {len(scores)}, {_brief(scores)}")
        unknown = ("remove_extra_whitespaces", "precompiled_charsmap")
        set_here = [f"tokenizer.ggml.{name}" for name in unknown if metadata.get(f"tokenizer.ggml.{name}")]
        problems += [f"{name} is not supported" for name in set_here]
    pairs = [tuple(merge.split(" ")) for merge in entry("merges", list, [], str)] if not scored else []
    if not scored and (not pairs or any(len(pair) != 2 for pair in pairs)):
        problems.append("tokenizer.ggml.merges: expected pairs of tokens")
    special: dict[str, str] = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = entry(f"{key}_token_id", int, None)
        if token is not None and not 0 <= token < len(tokens):
            problems.append(f"tokenizer.ggml.{key}_token_id: expected an id in 0..{len(tokens) - 1}, got {token!r}")
        elif token is not None:
            special[name] = tokens[token]
    adds_bos = scored or (pre in _SPLITTINGS and _SPLITTINGS[pre].adds_bos)
    adds = {"bos": entry("add_bos_token", bool, adds_bos), "eos": entry("add_eos_token", bool, False)}
    space_prefix = entry("add_space_prefix", bool, True)
    if not isinstance(metadata.get("tokenizer.chat_template"), str | None):
        problems.append("tokenizer.chat_template: expected a string")
    if problems:
        raise CheckpointError(path, problems)
    added = {name for name, wanted in adds.items() if wanted and name in special}
    return _Vocabulary(model, pre or "default", tokens, kinds, pairs, scores, special, added, space_prefix)


def _brief(value: Any) -> str:
    return repr(value[:3])[:60] + "..." if isinstance(value, list | str) and len(value) > 3 else repr(value)
