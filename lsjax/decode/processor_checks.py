"""What a caller gives as logits processors, checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsjax.checks import is_traced
from lsjax.decode.processors import (
    BIASES,
    COUNT,
    IDS,
    SIGNATURE,
    Builtin,
    ForbiddenIds,
    Kind,
    LogitBias,
    Processor,
    Processors,
    RepetitionPenalty,
    compose,
    map_values,
)
from lsjax.decode.prompts import bucket
from lsjax.decode.stopping import NO_TOKEN

_LEAST_IDS = 4  # the smallest bucket of lists of ids


def check_processors(
    processors: Processor | Iterable[Processor], *, batch: int, slots: int, vocab_size: int
) -> Processors:
    """:func:`compose` with every concrete value checked, before anything is compiled.

    Lists of ids are filled up to few sizes, so that another number of ids rarely compiles anew.

    Args:
        processors: one or several.
        batch: rows of a batch.
        slots: the width of ``tokens``.
        vocab_size: ids are below it.

    Raises:
        TypeError: one that is no function of ``(logits, tokens, lengths)``.
        ValueError: a value out of range or of another shape than ``batch`` allows, or a function that returns another
            shape or dtype than it was given; says what was expected and what came.
    """
    composed = compose(processors)
    members = []
    for index, member in enumerate(composed.members):
        if isinstance(member, Builtin):
            _check_builtin(member, batch, vocab_size)
            member = member if is_traced(member) else map_values(_fill_up, member)
        else:
            _check_own(f"processors[{index}]", member, batch, slots, vocab_size)
        members.append(member)
    return Processors(tuple(members))


def _fill_up(name: str, value: Any, kind: Kind) -> Any:
    """A list as wide as one of few sizes, filled up with ids that are none and with biases of 0."""
    if kind.rank == 0:
        return value
    missing = bucket(value.shape[-1], _LEAST_IDS) - value.shape[-1]
    widths = [(0, 0)] * (value.ndim - 1) + [(0, missing)]
    return np.pad(value, widths, constant_values=NO_TOKEN if kind is IDS else 0)


def _check_builtin(member: Builtin, batch: int, vocab_size: int) -> None:
    def check(name: str, value: Any, kind: Kind) -> Any:
        shape = value.shape
        if len(shape) not in (kind.rank, kind.rank + 1) or (len(shape) > kind.rank and shape[0] != batch):
            one, rows = ("[n]", f"[{batch}, n]") if kind.rank else ("[]", f"[{batch}]")
            raise ValueError(f"{name}: expected the shape {one} or {rows}, one for each row, got {list(shape)}")
        if not is_traced(value):
            _check_range(name, member, value, kind, vocab_size)
        return value

    map_values(check, member)
    if isinstance(member, LogitBias) and member.ids.shape[-1] != member.values.shape[-1]:
        raise ValueError(
            f"LogitBias.values: expected one for each of the {member.ids.shape[-1]} ids, got {member.values.shape[-1]}"
        )
    if isinstance(member, ForbiddenIds) and not is_traced(member.ids):
        for ids in np.atleast_2d(member.ids):
            if len(np.unique(ids[ids >= 0])) == vocab_size:
                raise ValueError(f"ForbiddenIds.ids: expected to leave some of the {vocab_size} ids, got all of them")


def _check_range(name: str, member: Builtin, value: np.ndarray, kind: Kind, vocab_size: int) -> None:
    if kind is IDS:
        bad, expected = (value < NO_TOKEN) | (value >= vocab_size), f"ids in 0..{vocab_size - 1} (-1: none)"
    elif kind is COUNT:
        bad, expected = value < 0, "at least 0"
    elif kind is BIASES:
        bad, expected = np.isnan(value) | np.isposinf(value), "finite numbers or -inf"
    else:
        bad, expected = ~np.isfinite(value), "finite numbers"
        if isinstance(member, RepetitionPenalty):
            bad, expected = bad | (value <= 0), "finite numbers above 0"
    if bad.any():
        raise ValueError(f"{name}: expected {expected}, got {value[bad].flat[0]}")


def _check_own(name: str, member: Any, batch: int, slots: int, vocab_size: int) -> None:
    """A processor of the caller's own, by what it returns for abstract arguments."""
    logits = jax.ShapeDtypeStruct((batch, vocab_size), jnp.float32)
    shapes = (batch, slots), (batch,), (batch, _LEAST_IDS)
    tokens, lengths, eos = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)
    bound = Processors((member,)).bind(lengths, eos)
    try:
        found: Any = jax.eval_shape(_call, bound, logits, tokens, lengths)
    except Exception as error:
        error.add_note(f"{name}: expected {SIGNATURE} that can be traced, this is the error that {member!r} gave")
        raise
    if not isinstance(found, jax.ShapeDtypeStruct) or (found.shape, found.dtype) != (logits.shape, logits.dtype):
        what = f"{found.dtype} {list(found.shape)}" if isinstance(found, jax.ShapeDtypeStruct) else f"{found!r}"
        raise ValueError(f"{name}: expected it to return float32 {list(logits.shape)}, got {what} of {member!r}")


def _call(processor: Processors, logits: jax.Array, tokens: jax.Array, lengths: jax.Array) -> Any:
    return processor(logits, tokens, lengths)  # one function for all, so that eval_shape remembers what it traced
