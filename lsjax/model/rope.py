"""Rotary position embedding (arXiv 2104.09864), with the two halves of a head rotated against each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from lsjax.config import LlamaConfig


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """Radians a position by which each pair of channels turns: float32 ``[head_dim / 2]``.

    Follows transformers' float32 operations one by one, each correctly rounded, since a last-bit difference here
    grows with the position. ``linear`` divides by the factor (arXiv 2306.15595); ``llama3`` does so for long
    wavelengths only, with a linear passage between the two bands (Llama 3.1's reference code).
    """
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    power = np.power(np.float64(config.rope_theta), exponent.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / power
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    stretched = frequencies / np.float32(scaling.factor)
    if scaling.rope_type == "linear":
        return stretched
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    original = scaling.original_max_position_embeddings
    if low is None or high is None or original is None:
        raise ValueError(f"rope_type {scaling.rope_type!r} lacks its frequency bands: {scaling!r}")
    wavelength = np.float32(2 * np.pi) / frequencies
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * frequencies / np.float32(scaling.factor) + smooth * frequencies
    return np.where(
        wavelength > original / low, stretched, np.where(wavelength < original / high, frequencies, between)
    ).astype(np.float32)


def rotation(config: LlamaConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines for integer positions ``[...]``: two float32 arrays ``[..., head_dim / 2]``."""
    angles = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


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
