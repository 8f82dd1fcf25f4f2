"""Tokenizers of a few given tokens, in the two manners that Llamas have."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def byte_level(*tokens: bytes, special: tuple[str, ...] = ("<s>", "</s>"), **settings: Any):
    """GPT-2's and Llama 3's manner: ids 0 to 255 are bytes, then these tokens of several bytes, then special ones.

    Text is encoded in single bytes, so that a test chooses the tokens.
    """
    letters = byte_letters()
    words = [*letters, *("".join(letters[byte] for byte in token) for token in tokens)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer, special, settings)


def sentencepiece(*tokens: str, special: tuple[str, ...] = ("<s>", "</s>"), **settings: Any):
    """Llama 2's manner: ids 0 to 255 are bytes, then these tokens, in which a space is "▁", then special ones.

    Decoding drops one space in front.
    """
    vocabulary = {word: index for index, word in enumerate([*BYTES, *tokens])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(tokenizer, special, settings)


def _wrap(tokenizer: Tokenizer, special: tuple[str, ...], settings: dict[str, Any]):
    from transformers import PreTrainedTokenizerFast

    tokenizer.add_special_tokens(list(special))
    names = dict(zip(("bos_token", "eos_token"), special, strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names, **settings)
