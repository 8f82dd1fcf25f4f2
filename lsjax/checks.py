"""Checks of arguments that several entry points share: one clear error, before any work is done."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from lsjax.config import LlamaConfig


def is_traced(*trees: Any) -> bool:
    """Whether any array of these trees is abstract, as inside ``jit``, ``vmap`` or ``eval_shape``."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))


def check_params(params: Any) -> None:
    """That ``params`` is a model, not the bare tree of one."""
    if not isinstance(getattr(params, "config", None), LlamaConfig):
        raise TypeError(
            "params: expected lsjax.Params, as lsjax.load, lsjax.init or lsjax.Params(config, tree) make them; "
            f"got {type(params).__name__}"
        )


def check_int(name: str, value: Any, least: int) -> int:
    """``value`` as a Python int of at least ``least``."""
    if isinstance(value, Tracer):
        raise TypeError(f"{name} must be a Python int, since shapes depend on it; got a traced value")
    if not hasattr(value, "__index__") or isinstance(value, bool) or int(value) < least:
        raise ValueError(f"{name}: expected an int of at least {least}, got {value!r}")
    return int(value)


def check_depth(name: str, value: Any, config: LlamaConfig) -> int:
    """``value`` as a number of layers, 1 to all of them."""
    layers = config.num_hidden_layers
    if not hasattr(value, "__index__") or isinstance(value, bool) or not 1 <= int(value) <= layers:
        raise ValueError(f"{name}: expected a layer in 1..{layers}, got {value!r}")
    return int(value)


def check_tokens(tokens: Any, config: LlamaConfig) -> tuple[Any, bool]:
    """Token ids as int32 ``[batch, length]``, and whether they came as one row ``[length]``.

    Concrete ids come back as a NumPy array, checked against the vocabulary; traced ids keep their values unchecked
    (the model reads the vocabulary's nearest end for an id outside it).
    """
    if not is_traced(tokens):
        try:
            tokens = np.asarray(tokens)
        except ValueError as error:  # rows of unequal length
            raise ValueError(
                "tokens: expected an int array [length] or [batch, length]; pad unequal prompts and give "
                f"prompt_lengths or attention_mask ({error})"
            ) from None
        if not tokens.size:
            raise ValueError(f"tokens: expected at least one token a row, got an empty prompt of shape {tokens.shape}")
    if tokens.ndim not in (1, 2) or 0 in tokens.shape:
        raise ValueError(f"tokens: expected the shape [length] or [batch, length], got {tuple(tokens.shape)}")
    if not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(f"tokens: expected integers, got {tokens.dtype}")
    single = tokens.ndim == 1
    rows = tokens[None] if single else tokens
    if not is_traced(rows):
        outside = (rows < 0) | (rows >= config.vocab_size)
        if outside.any():
            row, column = np.argwhere(outside)[0]
            raise ValueError(
                f"tokens: expected ids in 0..{config.vocab_size - 1}, got {rows[row, column]} at row {row}, "
                f"position {column}"
            )
    return rows.astype(np.int32), single
