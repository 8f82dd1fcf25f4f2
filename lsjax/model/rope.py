"""Rotary position embedding (arXiv 2104.09864), with the two halves of a head rotated against each other."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsjax.config import LlamaConfig


def inverse_frequencies(config: LlamaConfig, length: int = 1) -> np.ndarray:
    """Radians a position by which each pair of channels turns: float32 ``[head_dim / 2]``.

    Follows transformers' float32 operations one by one, each correctly rounded, since a last-bit difference here
    grows with the position. ``linear`` divides by the factor (arXiv 2306.15595); ``llama3`` does so for long
    wavelengths only, with a linear passage between the two bands (Llama 3.1's reference code); ``yarn`` likewise, with
    the passage between two channels (arXiv 2309.00071); ``longrope`` divides each frequency by a number of its own
    (arXiv 2402.13753); ``dynamic`` leaves them as they are up to the trained length (:func:`rotation` goes on).

    Args:
        config: the model's configuration.
        length: longrope: what the text may come to; above the original length its long factors are taken.
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    power = np.power(np.float64(config.rope_theta), exponent.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / power
    scaling: Any = config.rope_scaling
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies
    original = scaling.original_max_position_embeddings
    if scaling.rope_type == "longrope":
        factors = scaling.long_factor if length > original else scaling.short_factor
        return np.float32(1) / (np.asarray(factors, np.float32) * power)
    if scaling.rope_type == "yarn":
        stretched = np.float32(1) / (np.float32(scaling.factor) * power)
        kept = 1 - _yarn_ramp(config, scaling)
        return stretched * (1 - kept) + frequencies * kept
    stretched = frequencies / np.float32(scaling.factor)
    if scaling.rope_type == "linear":
        return stretched
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    wavelength = np.float32(2 * np.pi) / frequencies
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * frequencies / np.float32(scaling.factor) + smooth * frequencies
    return np.where(
        wavelength > original / low, stretched, np.where(wavelength < original / high, frequencies, between)
    ).astype(np.float32)


def _yarn_ramp(config: LlamaConfig, scaling: Any) -> np.ndarray:
    """How far each pair of channels is stretched, 0 to 1: float32 ``[head_dim / 2]``."""

    def channel(turns: float) -> float:
        """The channel, not rounded, that turns so often within the original length."""
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return config.head_dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

    first, last = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.head_dim - 1)
    last += 0.001 * (first == last)  # as transformers has it
    ramp = (np.arange(config.head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(last - first)
    return np.clip(ramp, 0, 1)


def attention_scaling(config: LlamaConfig) -> float:
    """What cosines and sines are multiplied by: not 1 for yarn and longrope, whose papers sharpen attention by it."""
    scaling: Any = config.rope_scaling
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)
    stretch = math.log(scaling.factor)
    if scaling.rope_type == "longrope":
        return math.sqrt(1 + stretch / math.log(scaling.original_max_position_embeddings))
    if scaling.mscale and scaling.mscale_all_dim:
        return (0.1 * scaling.mscale * stretch + 1) / (0.1 * scaling.mscale_all_dim * stretch + 1)
    return 0.1 * stretch + 1


def rotation(config: LlamaConfig, positions: jax.Array, length: int = 1) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for integer positions ``[...]``: two float32 arrays ``[..., head_dim / 2]``.

    ``dynamic``: positions past ``max_position_embeddings`` turn by the base that a text ending there would have, each
    by its own. That is what transformers computes where it reads token by token into its cache; where it reads a longer
    text at once, it turns all of it by the base of its end, which no cache can hold.

    Args:
        config: the model's configuration.
        positions: int ``[...]``.
        length: static; as of :func:`inverse_frequencies`.
    """
    frequencies: Any = inverse_frequencies(config, length)
    scaling = config.rope_scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        trained = config.max_position_embeddings
        beyond = jnp.maximum(positions[..., None] + 1 - trained, 0).astype(jnp.float32)
        stretch = jnp.log1p(beyond * np.float32(scaling.factor / trained))
        share = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim - 2)
        frequencies = frequencies * jnp.exp(-stretch * share)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    scale = np.float32(attention_scaling(config))
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns every head of ``x`` ``[..., length, heads, head_dim]`` by its position's angles; the dtype stays.

    Args:
        x: queries or keys.
        cos: float32 ``[..., length, head_dim / 2]`` of :func:`rotation`.
        sin: likewise.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
