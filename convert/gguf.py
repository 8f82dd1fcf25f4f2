"""A model in one GGUF file (llama.cpp's format), dequantized tensor by tensor through the ``gguf`` package.

The configuration and the tokenizer come from the file's metadata. The format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lsjax.config import LlamaConfig, RopeScaling
from lsjax.convert.checkpoint import Checkpoint, CheckpointError, Listing, Stored, read_array
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
    "vocab_size",
}
# ... and that changes nothing of what the model computes. Whatever else there is gets refused.
_HARMLESS = {"rope.scaling.finetuned", "rope.scaling.original_context_length", "tensor_data_layout"}
_OFF = {"expert_count", "expert_used_count", "attention.sliding_window"}  # harmless when 0


def describe(path: Path) -> Checkpoint:
    """The checkpoint in a GGUF file; its tensors read as float32, whatever the file stores.

    Raises:
        CheckpointError: not a whole GGUF file. Another architecture, and entries of the metadata that lsjax does not
            compute, are among the checkpoint's problems, by name.
        ImportError: the ``gguf`` package is not installed.
    """
    reader = _open(path)
    metadata = _metadata(reader, path)
    listing = _list_tensors(reader, path)
    try:
        return Checkpoint(path, "gguf", GGUF, listing, _config(metadata, listing, path), entries=metadata)
    except CheckpointError as error:
        return Checkpoint(path, "gguf", GGUF, listing, None, error.problems, metadata)


def read_metadata(path: Path) -> dict[str, Any]:
    """Everything that a GGUF file says beside its tensors, as ``{"general.architecture": "llama", ...}``.

    Raises:
        CheckpointError: not a whole GGUF file.
        ImportError: the ``gguf`` package is not installed.
    """
    return _metadata(_open(path), path)


def _open(path: Path) -> Any:
    """The package's reader of this file, made to check what it reads against the file's size."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("GGUF files are read through the gguf package: pip install 'lsjax[demo]'") from error

    class Reader(gguf.GGUFReader):
        # Beyond the end the package's reader gets empty arrays, and a damaged length keeps it looping over them.
        def _get(self, offset, dtype, count=1, override_order=None):
            dtype, count, offset = np.dtype(dtype), int(count), int(offset)
            end = offset + dtype.itemsize * count
            if end > self.data.size:
                raise ValueError(f"expected at least {end:,} bytes, got {self.data.size:,}")
            self.data = self.data.view(np.ndarray)  # slicing a memmap costs several times as much
            return super()._get(offset, dtype, count, override_order)

        # One object for a whole array of numbers, not one for each.
        def _get_field_parts(self, orig_offs, raw_type):
            if raw_type == gguf.GGUFValueType.ARRAY:
                item, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
                number = self.gguf_scalar_to_np.get(item[0])
                if number is not None:
                    values = self._get(orig_offs + 12, number, length[0])
                    types = [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType(item[0])]
                    return 12 + values.nbytes, [item, length, values], [2], types
            return super()._get_field_parts(orig_offs, raw_type)

    try:
        return Reader(path)
    except OSError:
        raise
    except Exception as error:  # the package raises whatever NumPy happens to raise on damaged bytes
        raise CheckpointError(path, [f"not GGUF, truncated or altered: {error}"]) from error


def _metadata(reader: Any, path: Path) -> dict[str, Any]:
    try:
        return {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # for instance text that is not UTF-8
        raise CheckpointError(path, [f"truncated or altered metadata: {error}"]) from error


def _list_tensors(reader: Any, path: Path) -> Listing:
    import gguf

    def read(tensor: Any) -> np.ndarray:
        # Not from the reader's memory map, whose pages would stay in memory.
        data = read_array(path, int(tensor.data_offset), tensor.data.shape, tensor.data.dtype)
        values = gguf.dequantize(data, tensor.tensor_type)
        return values.astype(np.float32, copy=False).reshape(tensor.shape.tolist()[::-1])

    @functools.cache
    def dtype_of(kind: Any) -> str:
        block = np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8)
        try:
            gguf.dequantize(block.view(np.float16) if kind == gguf.GGMLQuantizationType.F16 else block, kind)
        except NotImplementedError:
            return f"ggml {kind.name}"
        return "F32"  # what all are dequantized to

    return Listing(
        tuple(
            Stored(
                tensor.name,
                tuple(tensor.shape.tolist()[::-1]),
                dtype_of(tensor.tensor_type),
                path.name,
                functools.partial(read, tensor),
                int(tensor.n_bytes),
                tensor.tensor_type.name,
            )
            for tensor in reader.tensors
        )
    )


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
    if "rope_freqs.weight" in shapes:
        problems.append("rope_freqs.weight: rope factors (Llama 3.1's scaling) are not supported in GGUF")
    head_dim = entries.get("attention.key_length", entries.get("rope.dimension_count", 0))
    for name in ("attention.value_length", "rope.dimension_count"):
        if entries.get(name, head_dim) != head_dim:
            problems.append(f"llama.{name}: expected the heads' size {head_dim!r}, got {entries[name]!r}")
    if problems:
        raise CheckpointError(path, problems)
    try:
        return LlamaConfig(
            vocab_size=shapes.get("token_embd.weight", (entries.get("vocab_size", 0),))[0],
            hidden_size=entries["embedding_length"],
            intermediate_size=entries["feed_forward_length"],
            num_hidden_layers=entries["block_count"],
            num_attention_heads=entries["attention.head_count"],
            num_key_value_heads=entries.get("attention.head_count_kv", 0),
            head_dim=head_dim,
            max_position_embeddings=entries["context_length"],
            rms_norm_eps=_decimal(entries["attention.layer_norm_rms_epsilon"]),
            rope_theta=_decimal(entries.get("rope.freq_base", 10000.0)),
            rope_scaling=_rope_scaling(entries),
            attention_bias="blk.0.attn_q.bias" in shapes,
            mlp_bias="blk.0.ffn_up.bias" in shapes,
            tie_word_embeddings="output.weight" not in shapes,
            bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
            eos_token_id=_stops(metadata),
            pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
        )
    except (ValueError, TypeError) as error:
        raise CheckpointError(path, [f"metadata: {error}"]) from error


def _rope_scaling(entries: Mapping[str, Any]) -> RopeScaling | None:
    kind = entries.get("rope.scaling.type", "linear" if "rope.scale_linear" in entries else "none")
    factor = entries.get("rope.scaling.factor", entries.get("rope.scale_linear", 1.0))
    if kind == "none" or (kind == "linear" and factor in (0, 1)):  # llama.cpp reads 0 as "no scaling"
        return None
    if kind != "linear":
        raise ValueError(f"llama.rope.scaling.type: expected 'none' or 'linear', got {kind!r}")
    return RopeScaling(rope_type="linear", factor=_decimal(factor))


def _stops(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a text, a turn or a message, each once."""
    names = ("eos", "eot", "eom")
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    return tuple(dict.fromkeys(token for token in ids if token is not None))


def _decimal(value: Any) -> Any:
    """A float32 of the metadata as the decimal that was meant: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
