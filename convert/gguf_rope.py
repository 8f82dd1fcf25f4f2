"""How a GGUF file stretches rotary frequencies: entries of its metadata, and tensors of factors."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from lsjax.config import LlamaConfig, RopeScaling
from lsjax.convert.checkpoint import Listing

FACTORS = "rope_freqs.weight"
SHORT_FACTORS, LONG_FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"

# What llama.cpp's converter knows no other of: Llama 3.1's bands, 8 for Llama 3.1 and 3.3, 32 for Llama 3.2.
_BANDS = 1.0, 4.0
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3_LENGTHS = (8192, *(2**n for n in range(6, 21)))


def read_rope_scaling(entries: Mapping[str, Any], listing: Listing, config: LlamaConfig) -> RopeScaling | None:
    """The scaling that a file describes, as llama.cpp computes it.

    ``yarn`` and ``longrope`` mean what they mean in transformers, but llama.cpp multiplies what the paper says for
    yarn's attention by ``rope.scaling.attn_factor``, and has no other attention factor for longrope.
    ``rope_freqs.weight`` divides each frequency by a number of its own: those of Llama 3.1's formula are recognised,
    and whatever else it holds is kept as it is, as longrope's short and long factors.

    Args:
        entries: the metadata under ``llama.``.
        listing: the file's tensors.
        config: the model's configuration without scaling.

    Raises:
        ValueError: an entry or a tensor that lsjax does not compute, or several that llama.cpp would combine.
    """
    kind = entries.get("rope.scaling.type", "linear")  # as llama.cpp reads it
    factor = _number(entries, "rope.scaling.factor", _number(entries, "rope.scale_linear", 1.0))
    factor = 1.0 if kind == "none" or factor == 0 else factor  # 0: llama.cpp's "no scaling"
    attention = _number(entries, "rope.scaling.attn_factor", 1.0)
    original = entries.get("rope.scaling.original_context_length", config.max_position_embeddings)
    names = {FACTORS, SHORT_FACTORS, LONG_FACTORS} & {tensor.name for tensor in listing.tensors}
    if kind == "longrope" and names == {SHORT_FACTORS, LONG_FACTORS} and factor == 1:
        short, long = (_factors(listing, name, config.head_dim // 2) for name in (SHORT_FACTORS, LONG_FACTORS))
        return _longrope(short, long, original, attention)
    if kind not in ("none", "linear", "yarn"):
        wanted = "'none', 'linear', 'yarn' or 'longrope' (with both tensors of factors and no other factor)"
        raise ValueError(f"llama.rope.scaling.type: expected {wanted}, got {kind!r}")
    if names - {FACTORS} or (names and factor != 1):
        combined = f"with llama.rope.scaling.type {kind!r} and factor {factor!r}"
        raise ValueError(f"{', '.join(sorted(names))}: rope factors {combined} are not supported")
    if kind == "yarn" and factor != 1:
        return RopeScaling(
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=None if attention == 1 else attention * (0.1 * math.log(max(factor, 1)) + 1),
            beta_fast=_number(entries, "rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=_number(entries, "rope.scaling.yarn_beta_slow", 1.0),
        )
    if attention != 1:
        raise ValueError(f"llama.rope.scaling.attn_factor: expected 1 for type {kind!r}, got {attention!r}")
    if names:
        factors = _factors(listing, FACTORS, config.head_dim // 2)
        if all(number == 1 for number in factors):
            return None
        return _llama3(factors, config) or _longrope(factors, factors, original, 1.0)
    return None if factor == 1 else RopeScaling(rope_type="linear", factor=factor)


def decimal(value: Any) -> Any:
    """A float32 of the metadata as the decimal that was meant: 1e-5, not 9.999999747378752e-06."""
    if not isinstance(value, float):
        return value
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


def _number(entries: Mapping[str, Any], name: str, default: float) -> float:
    value = decimal(entries.get(name, default))
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ValueError(f"llama.{name}: expected a number of at least 0, got {value!r}")
    return float(value)


def _factors(listing: Listing, name: str, count: int) -> tuple[float, ...]:
    """The numbers of one tensor; only a tensor of the right size, in a file without problems, is read."""
    tensor = next(tensor for tensor in listing.tensors if tensor.name == name)
    if tensor.shape != (count,) or tensor.dtype != "F32":
        found = f"{list(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"{name}: expected {count} floating-point numbers, got {found}")
    if listing.problems:
        raise ValueError(f"{name}: not read, since the file has other problems")
    return tuple(decimal(number) for number in tensor.read().tolist())


def _longrope(short: tuple[float, ...], long: tuple[float, ...], original: Any, attention: float) -> RopeScaling:
    return RopeScaling(
        rope_type="longrope",
        factor=1.0,  # only the attention factor would follow from it
        original_max_position_embeddings=original,
        attention_factor=attention,
        short_factor=short,
        long_factor=long,
    )


def _llama3(factors: tuple[float, ...], config: LlamaConfig) -> RopeScaling | None:
    """The parameters of Llama 3.1's formula that give these factors, to rounding; None: it does not give them."""
    from lsjax.model.rope import inverse_frequencies  # here, since other headers are read without JAX

    plain = inverse_frequencies(config)
    for factor, length in itertools.product(dict.fromkeys((max(factors), *_LLAMA3_FACTORS)), _LLAMA3_LENGTHS):
        if not 1 <= factor < 1e15:
            continue
        scaling = RopeScaling("llama3", factor, *_BANDS, original_max_position_embeddings=length)
        scaled = inverse_frequencies(dataclasses.replace(config, rope_scaling=scaling))
        if np.allclose(plain / scaled, factors, rtol=5e-5, atol=0):
            return scaling
    return None
