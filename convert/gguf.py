"""A model in one GGUF file (llama.cpp's format), dequantized tensor by tensor through the ``gguf`` package.

The configuration and the tokenizer come from the file's metadata. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lsjax.config import LlamaConfig
from lsjax.convert.checkpoint import Checkpoint, CheckpointError, Listing, Stored, read_array
from lsjax.convert.gguf_header import Header, TensorInfo, read_header
from lsjax.convert.gguf_rope import decimal, read_rope_scaling
from lsjax.convert.names import GGUF

# Metadata under "llama." that `_config` reads ...
_USED = {
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "vocab_size",
}
# ... and that changes nothing of what the model computes. Whatever else there is gets refused.
_HARMLESS = {"rope.scaling.finetuned", "tensor_data_layout"}
_OFF = {"expert_count", "expert_used_count", "attention.sliding_window"}  # harmless when 0


def describe(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file; its tensors read as float32, whatever the file stores.

    Raises:
        CheckpointError: not a whole GGUF file. Another architecture, and entries of the metadata that lsjax does not
            compute, are among the checkpoint's problems, by name.
        ImportError: the ``gguf`` package is not installed.
    """
    header = read_header(path)
    listing = _list_tensors(header, path)
    try:
        return Checkpoint(path, "gguf", GGUF, listing, _config(header.metadata, listing, path), entries=header.metadata)
    except CheckpointError as error:
        return Checkpoint(path, "gguf", GGUF, listing, None, error.problems, header.metadata)


def read_metadata(path: Path) -> dict[str, Any]:
    """Everything that a GGUF file says beside its tensors, as ``{"general.architecture": "llama", ...}``.

    Raises:
        CheckpointError: not a GGUF file, or its header is damaged.
    """
    return read_header(path).metadata


def _list_tensors(header: Header, path: Path) -> Listing:
    """The tensors, each where it has to be: one after the other, padded to the alignment, as ggml insists too."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF tensors are read through the gguf package: pip install 'lsjax[demo]'") from error

    tensors, problems = [], []
    end: int | None = 0  # of the last tensor; None after one whose size is not known
    for info in header.tensors:
        expected = None if end is None else -(-end // header.alignment) * header.alignment
        if expected is not None and info.offset != expected:
            problems.append(f"wrong offset: {info.name} in {path.name}: expected {expected:,}, got {info.offset:,}")
        try:
            kind = gguf.GGMLQuantizationType(info.kind)
        except ValueError:  # refused by this name; where the next tensor starts is not known
            read, end = functools.partial(np.empty, info.shape), None
            tensors.append(Stored(info.name, info.shape, f"ggml type {info.kind}", path.name, read))
            continue
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        size = math.prod(info.shape) // block * block_bytes
        end = info.offset + size
        if info.shape[-1] % block:
            rows = f"rows of a multiple of {block} for {kind.name}"
            problems.append(f"wrong shape: {info.name} in {path.name}: expected {rows}, got {list(info.shape)}")
        elif header.start + end > header.size:
            sizes = f"expected {header.start + end:,} bytes, got {header.size:,}"
            problems.append(f"truncated or altered: {info.name} in {path.name}: {sizes}")
        read = functools.partial(_read, path, header.start + info.offset, info, kind)
        tensors.append(Stored(info.name, info.shape, _dtype_of(kind), path.name, read, size, kind.name))
    return Listing(tuple(tensors), tuple(problems))


@functools.cache
def _dtype_of(kind: Any) -> str:
    """``F32``, which all types are read as, or the name of one that the package does not dequantize."""
    import gguf

    if kind == gguf.GGMLQuantizationType.F64:
        return "F32"
    try:
        gguf.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return f"ggml {kind.name}"
    return "F32"


def _read(path: Path, offset: int, info: TensorInfo, kind: Any) -> np.ndarray:
    import gguf

    if kind == gguf.GGMLQuantizationType.F64:
        stored = read_array(path, offset, info.shape, np.dtype(np.float64))
        with np.errstate(over="ignore"):
            values = stored.astype(np.float32)
        if np.isinf(values).sum() > np.isinf(stored).sum():
            raise CheckpointError(path, [f"out of range: {info.name} holds numbers beyond the range of float32"])
        return values
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows = (*info.shape[:-1], info.shape[-1] // block * block_bytes)
    with np.errstate(all="ignore"):  # of scales that are not finite; the numbers are the file's
        values = gguf.dequantize(read_array(path, offset, rows, np.dtype(np.uint8)), kind)
    return values.astype(np.float32, copy=False).reshape(info.shape)


def _config(metadata: Mapping[str, Any], listing: Listing, path: Path) -> LlamaConfig:
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(path, [f"general.architecture: expected 'llama', got {architecture!r}"])
    entries = {name.removeprefix("llama."): value for name, value in metadata.items() if name.startswith("llama.")}
    entries = {name: value for name, value in entries.items() if not (name in _OFF and value == 0)}
    shapes = {tensor.name: tensor.shape for tensor in listing.tensors}
    needed = (
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    )
    problems = [f"llama.{name} is missing" for name in needed if name not in entries]
    problems += [
        f"llama.{name} is not supported, got {value!r}"
        for name, value in entries.items()
        if name not in _USED | _HARMLESS
    ]
    head_dim = entries.get("attention.key_length", entries.get("rope.dimension_count", 0))
    for name in ("attention.value_length", "rope.dimension_count"):
        if entries.get(name, head_dim) != head_dim:
            problems.append(f"llama.{name}: expected the heads' size {head_dim!r}, got {entries[name]!r}")
    if problems:
        raise CheckpointError(path, problems)
    try:
        config = LlamaConfig(
            vocab_size=shapes.get("token_embd.weight", (entries.get("vocab_size", 0),))[0],
            hidden_size=entries["embedding_length"],
            intermediate_size=entries["feed_forward_length"],
            num_hidden_layers=entries["block_count"],
            num_attention_heads=entries["attention.head_count"],
            num_key_value_heads=entries.get("attention.head_count_kv", 0),
            head_dim=head_dim,
            max_position_embeddings=entries["context_length"],
            rms_norm_eps=decimal(entries["attention.layer_norm_rms_epsilon"]),
            rope_theta=decimal(entries.get("rope.freq_base", 10000.0)),
            attention_bias="blk.0.attn_q.bias" in shapes,
            mlp_bias="blk.0.ffn_up.bias" in shapes,
            tie_word_embeddings="output.weight" not in shapes,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=_stops(metadata),
            pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
        )
        return dataclasses.replace(config, rope_scaling=read_rope_scaling(entries, listing, config))
    except (ValueError, TypeError) as error:
        raise CheckpointError(path, [f"metadata: {error}"]) from error


def _stops(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a text, a turn or a message, each once."""
    names = ("eos", "eot", "eom")
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return tuple(dict.fromkeys(token for token in ids if token is not None))
