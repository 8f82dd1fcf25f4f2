"""What a caller may want of a run beyond plain greedy decoding; what is not asked for is no part of the program."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import flax.struct
import jax

from lsjax.checks import check_int
from lsjax.config import LlamaConfig
from lsjax.decode.processor_checks import check_processors
from lsjax.decode.processors import Processor, Processors
from lsjax.decode.sampling import Sampling, make_sampling, row_values
from lsjax.decode.stopping import stop_array

SCHEDULES = ("constant", "heuristic")


class Options(flax.struct.PyTreeNode):
    """How a run differs from plain greedy decoding; every array starts with the batch axis.

    Attributes:
        sampling: how tokens are drawn; None: the most probable ones.
        processors: what changes the logits before a token is chosen.
        stops: int32 ``[batch, count, width]``, stop sequences, filled up in front with -1.
        confidence_threshold: float32 ``[batch]``; a row's drafting ends after a draft of which its early layers were
            less sure.
        process_drafts: static; whether the draft applies the processors too.
        schedule: static; how many drafts a row makes in its next round, one of ``SCHEDULES``.
        log_probs: static; whether log-probabilities of the new tokens are kept.
        top_n: static; how many of each position's most probable tokens are kept with theirs.
    """

    sampling: Sampling | None = None
    processors: Processors | None = None
    stops: jax.Array | None = None
    confidence_threshold: jax.Array | None = None
    process_drafts: bool = flax.struct.field(pytree_node=False, default=True)
    schedule: str = flax.struct.field(pytree_node=False, default="constant")
    log_probs: bool = flax.struct.field(pytree_node=False, default=False)
    top_n: int = flax.struct.field(pytree_node=False, default=0)


def make_options(
    config: LlamaConfig,
    batch: int,
    slots: int,
    *,
    processors: Processor | Iterable[Processor] | None = None,
    process_drafts: bool = True,
    stop_sequences: Any = None,
    confidence_threshold: Any = None,
    num_speculations_schedule: str = "constant",
    log_probs: bool = False,
    top_n: int | None = None,
    **sampling: Any,
) -> Options:
    """What a caller asks for, checked, one value a row.

    Args:
        config: the model's configuration.
        batch: rows.
        slots: the width of a state's tokens.
        processors: as of :func:`~lsjax.decode.generate.generate`, like the rest.
        process_drafts: static.
        stop_sequences: sequences of ids.
        confidence_threshold: a number or ``[batch]`` of them.
        num_speculations_schedule: static.
        log_probs: static.
        top_n: static.
        sampling: as of :func:`~lsjax.decode.sampling.make_sampling`.

    Raises:
        ValueError: says what was expected and what came.
    """
    for name, flag in (("process_drafts", process_drafts), ("log_probs", log_probs)):
        if not isinstance(flag, bool):
            raise ValueError(f"{name}: expected True or False, got {flag!r}")
    if num_speculations_schedule not in SCHEDULES:
        raise ValueError(
            f"num_speculations_schedule: expected one of {', '.join(SCHEDULES)}, got {num_speculations_schedule!r}"
        )
    bound = None
    if processors is not None:
        bound = check_processors(processors, batch=batch, slots=slots, vocab_size=config.vocab_size).to_rows(batch)
    return Options(
        sampling=make_sampling(batch, **sampling),
        processors=bound if bound is not None and bound.members else None,
        stops=None if stop_sequences is None else stop_array(stop_sequences, batch, config.vocab_size),
        confidence_threshold=row_values(
            "confidence_threshold", confidence_threshold, batch, "a number in 0..1", lambda x: (x >= 0) & (x <= 1)
        ),
        process_drafts=process_drafts,
        schedule=num_speculations_schedule,
        log_probs=log_probs or top_n is not None,
        top_n=0 if top_n is None else check_int("top_n", top_n, 1, config.vocab_size),
    )


def changed(given: dict[str, Any]) -> list[Any]:
    """The values of these options of :func:`make_options` that are not their defaults."""
    defaults = {"greedy_drafts": False, "process_drafts": True, "log_probs": False}
    defaults |= {"num_speculations_schedule": "constant"}
    return [value for name, value in given.items() if value is not None and value is not defaults.get(name)]
