"""Copies of arrays in another dtype or layout, made in blocks, with a look-out for numbers that do not fit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from lsjax.convert.checkpoint import DTYPES


def check_dtype(dtype: Any) -> np.dtype | None:
    """``dtype`` as one that weights can be loaded in, or None.

    Raises:
        ValueError: not a floating dtype of 16 bits or more, or one that JAX is not set to hold.
    """
    if dtype is None:
        return None
    try:
        found = np.dtype(dtype)
        if found in DTYPES.values() and _is_held(found):
            return found
    except TypeError:  # no dtype at all
        pass
    names = "bfloat16, float16 or float32 (float64 with jax_enable_x64)"
    raise ValueError(f"dtype: expected {names}, got {dtype!r}")


def _is_held(dtype: np.dtype) -> bool:
    """Whether JAX, as it is set, keeps a floating dtype as it is; only of float64 it has to be asked."""
    if dtype.itemsize < 8:
        return True
    import jax

    return jax.config.read("jax_enable_x64")


def cast(view: np.ndarray, dtype: np.dtype, block: int = 64) -> tuple[np.ndarray, bool]:
    """The array contiguous and in ``dtype``, and whether a finite number of it became infinite.

    It is the array itself where nothing changes. Else it is copied in blocks, which transposes four times as fast as
    one assignment.
    """
    if view.dtype == dtype and view.flags.c_contiguous:
        return view, False
    copied = np.empty(view.shape, dtype)
    with np.errstate(over="ignore"):  # infinities are looked for below
        if view.ndim < 2 or view.flags.c_contiguous:
            copied[...] = view
        else:
            for start in range(0, view.shape[1], block):
                copied[:, start : start + block] = view[:, start : start + block]
    narrows = ml_dtypes.finfo(dtype).max < ml_dtypes.finfo(view.dtype).max
    return copied, bool(narrows and np.isinf(copied).sum() > np.isinf(view).sum())
