"""What a caller asks for, checked: a static plan, and the traced rows that the compiled programs take."""

from __future__ import annotations

import sys
import warnings
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from lsjax.checks import check_depth, check_int, is_traced
from lsjax.config import LlamaConfig, token_ids
from lsjax.decode.options import Options
from lsjax.decode.prompts import Prompts, bucket, place_like, to_bucket
from lsjax.decode.state import Plan
from lsjax.decode.stopping import eos_array

STRATEGIES = ("self_speculative", "early_exit", "autoregressive")
MAX_NEW_TOKENS = 128
NUM_SPECULATIONS = 4
_LEAST_CAPACITY = 64  # the smallest bucket of eager calls


class Request(NamedTuple):
    """A batch of prompts and what is wanted of each; every array starts with the batch axis.

    Attributes:
        tokens: int32 ``[batch, width]``, each row from the left.
        lengths: int32 ``[batch]``, prompt tokens.
        limits: int32 ``[batch]``, the length at which a row is done.
        eos: int32 ``[batch, count]``, ids that end each row, filled up with -1.
        pad: int32 ``[batch]``, the id of padding.
        options: what else is wanted.
    """

    tokens: Any
    lengths: Any
    limits: Any
    eos: Any
    pad: Any
    options: Options = Options()

    def to_bucket(self, capacity: int) -> Request:
        """The same with prompts padded to one of few widths, for concrete prompts."""
        return self._replace(tokens=to_bucket(self.tokens, capacity))

    def place_like(self, tokens: Any) -> Request:
        """The same on the devices that the caller's ``tokens`` ``[batch, length]`` lie on, row by row."""
        return place_like(self, tokens)


def make_request(
    config: LlamaConfig,
    prompts: Prompts,
    limits: Any,
    eos_token_id: Any,
    pad_token_id: Any,
    options: Options,
) -> Request:
    """Prompts with their limits and special ids; these are values that may be traced, unlike the number of EOS ids."""
    if is_traced(eos_token_id):
        eos = jnp.atleast_1d(jnp.asarray(eos_token_id)).astype(jnp.int32)
    else:
        eos = eos_array(config.eos_token_id if eos_token_id is None else token_ids("eos_token_id", eos_token_id))
    if is_traced(pad_token_id):
        pad = pad_token_id.astype(jnp.int32)
    else:
        (pad,) = token_ids("pad_token_id", [config.pad_token_id or 0 if pad_token_id is None else pad_token_id])
        pad = np.int32(pad)
    batch = prompts.tokens.shape[0]
    xp: Any = jnp if is_traced(eos, pad) else np
    eos, pad = xp.broadcast_to(eos, (batch, *eos.shape)), xp.broadcast_to(pad, (batch,))
    return Request(prompts.tokens, prompts.lengths, limits, eos, pad, options)


def make_plan(config: LlamaConfig, exit_layer: int | None, num_speculations: int, strategy: str | None) -> Plan:
    """The static part of a run from the caller's options."""
    if strategy is None:
        strategy = "autoregressive" if exit_layer is None else "self_speculative"
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy: expected one of {', '.join(STRATEGIES)}, got {strategy!r}")
    drafts = check_int("num_speculations", num_speculations, 0)
    layers = config.num_hidden_layers
    depth = None if exit_layer is None else check_depth("exit_layer", exit_layer, config)
    if strategy == "autoregressive":
        return Plan(layers, layers, 0)
    if depth is None:
        raise ValueError(f"exit_layer: expected a layer in 1..{layers} for strategy {strategy!r}, got None")
    return Plan(depth, depth, 0) if strategy == "early_exit" else Plan(depth, layers, drafts)


def choose_capacity(config: LlamaConfig, prompts: Prompts, new: int, eager: bool) -> int:
    """Enough for ``new`` tokens a row, in few sizes where eager; a size by itself never makes a short text a long one.

    longrope turns texts that may come to more than its original length by other factors. A row must be what it is
    alone, so rows on both sides of that length are refused (traced lengths are not seen: there the width decides).
    """
    needed = prompts.width + new
    held = bucket(needed, _LEAST_CAPACITY) if eager else needed
    boundary = config.short_length
    if boundary is None or prompts.shortest + new > boundary:
        return held
    if needed > boundary:
        raise ValueError(
            f"tokens: rows that may come to {prompts.shortest + new} and to {needed} tokens (prompt, padding and new "
            f"ones) lie on both sides of longrope's original_max_position_embeddings={boundary}, where the rotation "
            f"changes: take them apart, or give capacity= (above {boundary}: the long factors for every row)"
        )
    return min(held, boundary)


def check_capacity(capacity: Any, width: int, needed: int) -> int:
    """A given capacity, which must hold the prompts' width and the tokens that are needed."""
    capacity = check_int("capacity", capacity, 1)
    if capacity < max(width, needed):
        raise ValueError(
            f"capacity: expected at least {max(width, needed)} tokens (prompt and new ones), got {capacity}"
        )
    return capacity


def warn_beyond_trained_length(config: LlamaConfig, length: int) -> None:
    """A warning that points at the user's own line, the nearest one outside this package."""
    if length > config.trained_length:
        dynamic = config.trained_length > config.max_position_embeddings
        warnings.warn(
            f"{length} tokens (prompt and new ones) exceed the length that the model was trained for, "
            f"max_position_embeddings={config.max_position_embeddings}"
            f"{' times the factor of its dynamic scaling' if dynamic else ''}: expect worse text past it",
            stacklevel=_levels_inside(),
        )


def _levels_inside() -> int:
    """The ``stacklevel`` with which a caller's warning points out of this package."""
    frame, level = sys._getframe(1), 1
    package = __name__.partition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == package:
        frame, level = frame.f_back, level + 1
    return level
