"""Checks of arguments that several entry points share: one clear error, before any work is done."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

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
    _check_mesh("params", params)


def _check_mesh(name: str, tree: Any) -> None:
    """That no array is sharded over axes whose placement the program itself would have to state."""
    for leaf in jax.tree.leaves(tree):
        # Of concrete arrays the sharding itself: making each one's type costs a round a millisecond.
        sharding: Any = jax.typeof(leaf).sharding if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        explicit = sharding.mesh.explicit_axes if isinstance(sharding, NamedSharding) else ()
        if explicit:
            raise ValueError(
                f"{name}: expected a mesh of automatic axes, such as jax.sharding.Mesh(mesh.devices, mesh.axis_names); "
                f"got explicit axes {', '.join(map(str, explicit))} (what jax.make_mesh makes by default)"
            )


def check_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    """``value`` as a Python int of at least ``least``, and at most ``most`` where that is given."""
    found = _static_int(name, value)
    if found is None or found < least or (most is not None and found > most):
        wanted = f"of at least {least}" if most is None else f"in {least}..{most}"
        raise ValueError(f"{name}: expected an int {wanted}, got {value!r}")
    return found


def check_number(name: str, value: Any, least: float, most: float = math.inf) -> float:
    """``value`` as a float of at least ``least``, and at most ``most`` where that is given."""
    is_number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not is_number or not least <= value <= most or math.isinf(value):
        wanted = f"of at least {least}" if most == math.inf else f"in {least}..{most}"
        raise ValueError(f"{name}: expected a number {wanted}, got {value!r}")
    return float(value)


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """``value``, one of a few names."""
    if value not in tuple(choices):
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def check_text(name: str, text: str) -> str:
    """A text without lone surrogates, which are bytes that were no UTF-8, or half a character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        part = text[max(error.start - 10, 0) : error.end + 10]
        raise ValueError(f"{name}: expected Unicode text, got the lone surrogate in {part!r}") from error
    return text


def check_depth(name: str, value: Any, config: LlamaConfig) -> int:
    """``value`` as a number of layers, 1 to all of them."""
    found, layers = _static_int(name, value), config.num_hidden_layers
    if found is None or not 1 <= found <= layers:
        raise ValueError(f"{name}: expected a layer in 1..{layers}, got {value!r}")
    return found


def _static_int(name: str, value: Any) -> int | None:
    """The int that a value is, or None; never a rounded one."""
    if isinstance(value, Tracer):
        raise TypeError(f"{name} must be a Python int, since programs and shapes depend on it; got a traced value")
    try:
        return None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        return None


def as_array(name: str, value: Any, kinds: str = "iu", expected: str = "integers") -> Any:
    """A number, list or array as a NumPy array, or as a traced one; its dtype's kind is one of ``kinds``."""
    if is_traced(value):
        array = jnp.asarray(value)
    else:
        try:
            array = np.asarray(value)
        except ValueError as error:  # rows of unequal length
            raise ValueError(
                f"{name}: expected an array, got rows of unequal length; pad unequal prompts and give prompt_lengths "
                f"or attention_mask ({error})"
            ) from None
    if array.dtype.kind not in kinds and array.size:
        what = type(value).__name__ if array.dtype.kind in "OUSV" else str(array.dtype)
        raise ValueError(f"{name}: expected {expected}, got {what}")
    return array


def read_tokens(tokens: Any) -> tuple[Any, bool]:
    """Integer ids as ``[batch, length]``, NumPy where they are concrete, and whether they came as one row."""
    rows = as_array("tokens", tokens)
    _check_mesh("tokens", rows)  # where it is traced; concrete rows are NumPy's by now
    if rows.ndim not in (1, 2):
        raise ValueError(f"tokens: expected the shape [length] or [batch, length], got {tuple(rows.shape)}")
    if not rows.size:
        raise ValueError(f"tokens: expected at least one token a row, got an empty prompt of shape {rows.shape}")
    single = rows.ndim == 1
    return (rows[None] if single else rows), single


def check_vocabulary(rows: Any, config: LlamaConfig, valid: Any = True) -> Any:
    """``rows`` as int32, its concrete ids inside the vocabulary wherever ``valid`` (broadcast) is true."""
    if not is_traced(rows, valid):
        outside = ((rows < 0) | (rows >= config.vocab_size)) & valid
        if outside.any():
            row, column = np.argwhere(outside)[0]
            raise ValueError(
                f"tokens: expected ids in 0..{config.vocab_size - 1}, got {rows[row, column]} at row {row}, "
                f"position {column}"
            )
    return rows.astype(np.int32)


def check_tokens(tokens: Any, config: LlamaConfig) -> tuple[Any, bool]:
    """Token ids as int32 ``[batch, length]``, and whether they came as one row ``[length]``.

    Concrete ids come back as a NumPy array, checked against the vocabulary; traced ids keep their values unchecked
    (the model reads the vocabulary's nearest end for an id outside it).
    """
    rows, single = read_tokens(tokens)
    return check_vocabulary(rows, config), single
