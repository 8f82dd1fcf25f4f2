"""``stream``: the rounds of decoding one by one from the host, each handed over as soon as it is there."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lsjax.checks import check_int, is_traced
from lsjax.decode.prefill import prefill
from lsjax.decode.round import decode_round
from lsjax.decode.state import DecodeState, Stats, check_usable
from lsjax.decode.stopping import NO_TOKEN
from lsjax.decode.token_scores import TokenScores
from lsjax.model.cache import LayerCache
from lsjax.params import Model


class StreamBlock(flax.struct.PyTreeNode):
    """What one round committed: NumPy arrays on the host.

    Attributes:
        tokens: int32 ``[batch, K + 1]``, each row's new tokens from the left, then -1, which is no token.
        counts: int32 ``[batch]``, how many they are: 1 to K + 1, 0 in rows that were done.
        drafted: bool ``[batch, K + 1]``, which of them are accepted drafts; the others are the model's own.
        done: bool ``[batch]``, rows that ended with this round or before.
        stats: what all rounds so far did.
        scores: log-probabilities of ``tokens``, ``[batch, K + 1]``; None where they were not asked for.
    """

    tokens: np.ndarray
    counts: np.ndarray
    drafted: np.ndarray
    done: np.ndarray
    stats: Stats
    scores: TokenScores | None = None

    def row(self, index: int) -> np.ndarray:
        """int32 ``[counts[index]]``: one row's new tokens."""
        return self.tokens[index, : self.counts[index]]


class Stream:
    """An iterator over the rounds of a decode state, each a :class:`StreamBlock`; it ends when every row is done.

    A round is one call of one compiled program, the same for all rounds, and one transfer of some hundred bytes to the
    host. The state's cache is donated to the first round, as :func:`~lsjax.decode.round.decode_round` does it.

    Args:
        params: the model.
        state: of :func:`~lsjax.decode.prefill.prefill` or of an earlier stream.

    Raises:
        ValueError: the state is another model's, or went into a round already.
        TypeError: inside ``jit`` or ``vmap``.
    """

    def __init__(self, params: Model, state: DecodeState) -> None:
        check_usable(params, state)
        if is_traced(params, state):
            raise TypeError(
                "stream: expected concrete arrays, since the host drives the rounds; got traced ones: inside jit or "
                "vmap use lsjax.generate, or lsjax.decode_round in a loop"
            )
        self._params, self._state = params, state
        self._done = np.array(state.done)
        self._stopped = np.zeros_like(self._done)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> StreamBlock:
        if self.done.all():
            raise StopIteration
        check_usable(self._params, self._state)
        state, cache = self._state.replace(cache=()), self._state.cache
        self._state, block = _next_block(self._params, state, cache, self._stopped)
        block = jax.device_get(block)
        self._done, self._stopped = block.done, np.zeros_like(self._stopped)
        return block

    @property
    def done(self) -> np.ndarray:
        """bool ``[batch]``: rows that get no more tokens."""
        return self._done | self._stopped

    @property
    def state(self) -> DecodeState:
        """The decode state after the last block, to continue from (``prefill(state=...)``); the next block takes it."""
        if not self._stopped.any():
            return self._state
        return self._state.replace(done=_either(self._state.done, self._stopped))

    def stop(self, rows: int | Sequence[int] | np.ndarray) -> None:
        """Ends rows: they get no more tokens, the other rows go on.

        Args:
            rows: an index, or several.

        Raises:
            ValueError: there is no such row.
        """
        given: Any = [rows] if np.ndim(rows) == 0 else rows
        self._stopped[[check_int("rows", row, 0, len(self._done) - 1) for row in given]] = True


def stream(params: Model, tokens: Any, **options: Any) -> Stream:
    """Decodes as :func:`~lsjax.decode.generate.generate` does, and hands over each round's tokens as they come.

    The blocks of a row, one after another, are the new tokens that ``generate`` returns for the same options. For
    rounds without a transfer to the host between them, see :func:`~lsjax.decode.round.decode_round`.

    Args:
        params: the model.
        tokens: int ``[length]`` or ``[batch, length]``, the prompts; blocks have a batch axis either way.
        options: those of :func:`~lsjax.decode.prefill.prefill`, ``state`` among them.

    Returns:
        an iterator over blocks, whose rows can be ended from outside (:meth:`Stream.stop`).

    Raises:
        ValueError: says what was expected and what came.
        TypeError: inside ``jit`` or ``vmap``.

    Example:
        >>> for block in lsjax.stream(params, tokens, exit_layer=4, max_new_tokens=128):
        ...     print(block.row(0), block.drafted[0])
    """
    return Stream(params, prefill(params, tokens, **options))


@functools.partial(jax.jit, donate_argnums=2)
def _next_block(
    params: Model, state: DecodeState, cache: tuple[LayerCache, ...], stopped: jax.Array
) -> tuple[DecodeState, StreamBlock]:
    before = state.replace(cache=cache, done=state.done | stopped)
    after = decode_round(params, before)
    slot = jnp.arange(state.plan.num_speculations + 1)
    counts = after.lengths - before.lengths
    kept = after.stats.accepted - before.stats.accepted
    # A round writes up to K + 1 tokens from the old length on; the slack past the capacity holds as many.
    cut = jax.vmap(lambda row, start: lax.dynamic_slice_in_dim(row, start, len(slot)))
    written = slot < counts[:, None]
    block: dict[str, Any] = {  # traced here, NumPy's when it is handed over
        "tokens": jnp.where(written, cut(after.tokens, before.lengths), NO_TOKEN),
        "counts": counts,
        "drafted": slot < kept[:, None],
        "done": after.done,
        "stats": after.stats,
    }
    if after.scores is not None:
        block["scores"] = jax.tree.map(lambda rows: cut(rows, before.lengths), after.scores)
    return after, StreamBlock(**block)


@jax.jit
def _either(done: jax.Array, stopped: jax.Array) -> jax.Array:
    return done | stopped
