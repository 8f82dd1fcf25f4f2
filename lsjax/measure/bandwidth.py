"""How fast memory can be read here, and how much of it a decoding step has to read."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsjax.checks import check_depth, check_int, check_params
from lsjax.params import Model

_ROW = 16_384  # numbers in a row of the array that is read
_LEAST_BYTES = 1 << 28
_ACCELERATOR_BYTES = 1 << 30
_QUEUED = 8  # runs in a row on an accelerator, so that their start is hidden


def read_bandwidth(device: Any = None, *, num_bytes: int | None = None, repetitions: int = 5) -> float:
    """The largest bandwidth, in bytes a second, at which a device was seen to read its memory just now.

    On CPUs all cores together reduce an array along its rows, in several forms (sum, maximum, product with a vector);
    the best run of the best form counts. The array is three times as large as the last-level caches (as far as
    ``/sys`` tells, and at least 256 MiB), for they would serve a smaller one: some servers' are 480 MiB. A model that
    fits into such a cache may be read faster than this, and its utilisation then exceeds 1. On accelerators the array
    has 1 GiB, and copying it counts, too: as read once and written once.

    Args:
        device: one of ``jax.devices()``; None: the first.
        num_bytes: the array's size; None: as above, but never more than an eighth of the memory.
        repetitions: runs of each form, at least 1.

    Raises:
        ValueError: fewer than one repetition, or an array smaller than a row of 64 KiB.
    """
    device = jax.devices()[0] if device is None else device
    repetitions = check_int("repetitions", repetitions, 1)
    size = _array_bytes(device) if num_bytes is None else check_int("num_bytes", num_bytes, 4 * _ROW)
    rows = size // (4 * _ROW)
    array = jax.device_put(_ones(rows), device)
    on_cpu = device.platform == "cpu"
    queued = 1 if on_cpu else _QUEUED
    best = 0.0
    for form, passes in ((_sum, 1), (_maximum, 1), (_product, 1)) if on_cpu else ((_copy, 2), (_sum, 1)):
        jax.block_until_ready(form(array))  # compiles
        for _ in range(repetitions):
            start = time.perf_counter()
            result = form(array)
            for _ in range(queued - 1):
                result = form(array)  # which lets go of the one before
            jax.block_until_ready(result)
            best = max(best, queued * passes * array.nbytes / (time.perf_counter() - start))
    return best


@functools.partial(jax.jit, static_argnums=0)
def _ones(rows: int) -> jax.Array:
    return jnp.ones((rows, _ROW), jnp.float32)


@jax.jit
def _sum(array: jax.Array) -> jax.Array:
    return array.sum(axis=1)


@jax.jit
def _maximum(array: jax.Array) -> jax.Array:
    return array.max(axis=1)


@jax.jit
def _product(array: jax.Array) -> jax.Array:
    return array @ jnp.ones(_ROW, array.dtype)


@jax.jit
def _copy(array: jax.Array) -> jax.Array:
    return array + 1


def _array_bytes(device: Any) -> int:
    if device.platform == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 1 << 33
        wanted = max(3 * last_level_cache_bytes(), _LEAST_BYTES)
    else:
        memory = (device.memory_stats() or {}).get("bytes_limit", 1 << 33)
        wanted = _ACCELERATOR_BYTES
    return max(min(wanted, memory // 8), 4 * _ROW)


def last_level_cache_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> int:
    """The size of the CPUs' last-level caches, all of them together; 0 where the system does not tell.

    Args:
        cpus: where Linux describes its CPUs.
    """
    caches: dict[tuple[int, str], int] = {}  # one that several CPUs share is listed by each
    for cache in cpus.glob("cpu[0-9]*/cache/index*"):
        try:
            level, size, sharing = ((cache / name).read_text().strip() for name in ("level", "size", "shared_cpu_list"))
            caches[int(level), sharing] = int(size[:-1]) << {"K": 10, "M": 20, "G": 30}[size[-1]]
        except (OSError, ValueError, LookupError):
            continue
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last)


def step_bytes(params: Model, *, num_layers: int | None = None, positions: Any = 0) -> int:
    """Bytes that one decoding step must read: weights and cache, each once.

    ``step_bytes(...) / seconds / read_bandwidth()`` is a step's bandwidth utilisation.

    Args:
        params: the model, as it is or prepared.
        num_layers: the first so many layers and the head, as a draft or an early exit runs; None: all.
        positions: cached positions that attention reads: a number for one row, or ``[batch]``.

    Raises:
        ValueError: no such layer.
    """
    return weight_bytes(params, num_layers) + cache_bytes(params, num_layers, positions)


def weight_bytes(params: Model, num_layers: int | None = None) -> int:
    """Bytes of weights that a step reads once for the whole batch: some layers, the final norm, the head.

    A tied head is the embedding, read as the head; the few rows of it that tokens look up are left out.

    Args:
        params: the model.
        num_layers: as of :func:`step_bytes`.
    """
    head = "lm_head" if "lm_head" in params.tree else "embed_tokens"
    names = [f"layers_{layer}" for layer in range(_depth(params, num_layers))] + ["norm", head]
    leaves = jax.tree.leaves([params.tree[name] for name in names])
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


def cache_bytes(params: Model, num_layers: int | None = None, positions: Any = 1) -> int:
    """Bytes of keys and values at some cached positions, a number or the numbers of several rows.

    Args:
        params: the model.
        num_layers: as of :func:`step_bytes`.
        positions: likewise.
    """
    numbers = 2 * _depth(params, num_layers) * params.config.num_key_value_heads * params.config.head_dim
    return round(numbers * params.dtype.itemsize * float(np.sum(positions)))


def _depth(params: Model, num_layers: int | None) -> int:
    check_params(params)
    config = params.config
    return config.num_hidden_layers if num_layers is None else check_depth("num_layers", num_layers, config)
