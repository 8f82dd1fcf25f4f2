"""The tokenizer of a model: transformers' own, or built from a GGUF file's metadata."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from lsjax.convert import gguf
from lsjax.convert.checkpoint import CheckpointError
from lsjax.sources import TOKENIZER_FILES, VOCABULARY_FILES, locate

if TYPE_CHECKING:  # importing transformers takes seconds
    from transformers import PreTrainedTokenizerFast

# How each vocabulary splits text before its merges apply, by the metadata's `tokenizer.ggml.pre`.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    # SmolLM's tokenizer.json: each digit alone, then GPT-2's pattern.
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}

_CONTROL, _USER_DEFINED = 3, 4  # in `tokenizer.ggml.token_type`


def load_tokenizer(
    source: str | os.PathLike[str], *, revision: str | None = None, progress: bool | None = None
) -> PreTrainedTokenizerFast:
    """Loads the tokenizer that belongs to a model.

    Args:
        source: what ``lsjax.load`` takes. Of a hub id only the tokenizer's files are fetched. A directory that
            ``lsjax.save`` wrote holds a tokenizer only if one was put there (``tokenizer.save_pretrained``).
        revision: a branch, tag or commit of a hub id.
        progress: whether to show the progress of fetching; None: where stderr is a terminal.

    Returns:
        a transformers tokenizer: call it on text for ``input_ids``, ``decode`` ids, ``apply_chat_template``.

    Raises:
        FileNotFoundError: no such source, or a directory without a tokenizer.
        CheckpointError: (a ValueError) a GGUF file with a vocabulary or pre-tokenizer that lsjax does not know.
        as ``lsjax.load``, as far as finding and fetching go.
    """
    path = locate(source, revision=revision, progress=progress, files=TOKENIZER_FILES)
    if path.is_file():
        return _from_gguf(path)
    if not any((path / name).is_file() for name in VOCABULARY_FILES):
        raise FileNotFoundError(f"{path} holds no tokenizer: expected tokenizer.json, tokenizer.model or vocab.json")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _from_gguf(path: Path) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the file's tokens and merges, its control tokens matched whole."""
    from transformers import PreTrainedTokenizerFast

    metadata = gguf.read_metadata(path)
    tokens, merges, kinds, special = _vocabulary(metadata, path)
    try:
        tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # what the tokenizers package raises for a merge of unknown tokens
        raise CheckpointError(path, [f"tokenizer.ggml.merges: {error}"]) from error
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[metadata["tokenizer.ggml.pre"]]()
    tokenizer.decoder = decoders.ByteLevel()
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        whole = [token for token, found in zip(tokens, kinds, strict=True) if found == kind]
        add([AddedToken(token, special=kind == _CONTROL, normalized=False) for token in whole])
    before, after = (
        [special[name]] if metadata.get(f"tokenizer.ggml.add_{name}_token") and name in special else []
        for name in ("bos", "eos")
    )
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], special_tokens=[(token, tokens.index(token)) for token in before + after]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=metadata.get("tokenizer.chat_template"),
        model_max_length=metadata.get("llama.context_length"),
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in special.items()},
    )


def _vocabulary(
    metadata: Mapping[str, Any], path: Path
) -> tuple[list[str], list[tuple[str, str]], list[int], dict[str, str]]:
    """Tokens, merges, the kind of each token and the special ones; one error names all that lsjax cannot use."""

    def entry(name: str) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}")

    problems = []
    if entry("model") != "gpt2":
        problems.append(f"tokenizer.ggml.model: expected 'gpt2' (byte-level BPE), got {entry('model')!r}")
    if entry("pre") not in _PRE_TOKENIZERS:
        problems.append(f"tokenizer.ggml.pre: expected one of {', '.join(_PRE_TOKENIZERS)}, got {entry('pre')!r}")
    tokens, merges = entry("tokens") or [], entry("merges") or []
    kinds = entry("token_type") or [1] * len(tokens)
    if not tokens or len(set(tokens)) < len(tokens):
        problems.append(f"tokenizer.ggml.tokens: expected different tokens, got {len(set(tokens))} among {len(tokens)}")
    if len(kinds) != len(tokens):
        problems.append(f"tokenizer.ggml.token_type: expected {len(tokens)} entries, got {len(kinds)}")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        problems.append("tokenizer.ggml.merges: expected pairs of tokens")
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = entry(f"{key}_token_id")
        if token is not None and not 0 <= token < len(tokens):
            problems.append(f"tokenizer.ggml.{key}_token_id: expected an id in 0..{len(tokens) - 1}, got {token!r}")
        elif token is not None:
            special[name] = tokens[token]
    if problems:
        raise CheckpointError(path, problems)
    return tokens, pairs, kinds, special
