"""Logits processors: pure functions that change logits by the text so far, before a token is chosen from them.

A processor is any function ``(logits, tokens, lengths) -> logits``:

- ``logits``: float32 ``[batch, vocab]``, of the token that follows; what comes back has the same shape and dtype.
- ``tokens``: int32 ``[batch, slots]``. ``tokens[i, :lengths[i]]`` is everything so far, prompt included; the slots
  after it hold anything, and no processor may look at them.
- ``lengths``: int32 ``[batch]``.

The ready ones below are pytrees whose values are leaves, one for all rows or one a row: another value compiles
nothing. Numbers are ``[]`` or ``[batch]``; ids are ``[n]`` or ``[batch, n]``, where -1 fills up and means no token.
Traced values are not checked. No intermediate is larger than the logits or the tokens.

A forbidden token's logit is -inf, as in transformers. A row of which every token is forbidden is all -inf: the greedy
choice is then id 0, and its softmax is NaN. Nothing here prevents that, beyond the error for a ``ForbiddenIds`` of the
whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from lsjax.checks import as_array, check_int, is_traced
from lsjax.decode.folding import Shared
from lsjax.decode.stopping import NO_TOKEN

Processor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
SIGNATURE = "a function of (logits, tokens, lengths)"
_OF_THE_RUN = ("prompt_lengths", "eos_token_id")  # fields that may be None: Processors.bind sets them


class Kind(NamedTuple):
    """What a leaf holds: its dtype, and its rank where it is the same for every row."""

    dtype: type[np.generic]
    rank: int


NUMBER, COUNT = Kind(np.float32, 0), Kind(np.int32, 0)
BIASES, IDS = Kind(np.float32, 1), Kind(np.int32, 1)


class Builtin(flax.struct.PyTreeNode):
    """A processor of this module, which says what its leaves are."""

    KINDS: ClassVar[dict[str, Kind]] = {}


class RepetitionPenalty(Builtin):
    """Divides the positive logits of tokens in the text so far by a penalty, and multiplies the negative ones.

    The prompt counts, as in transformers. CTRL, arXiv 1909.05858, section 4.1, in the form that transformers gave it.

    Attributes:
        penalty: float32 ``[]`` or ``[batch]``, above 0; 1 changes nothing, more than 1 discourages repetition.
    """

    penalty: Any
    KINDS: ClassVar = {"penalty": NUMBER}

    def __call__(self, logits: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """float32 ``[batch, vocab]``."""
        penalty = _per_row(self.penalty, jnp.float32)
        changed = jnp.where(logits < 0, logits * penalty, logits / penalty)
        return jnp.where(_counts(tokens, lengths, 0, logits.shape[1]) > 0, changed, logits)


class PresencePenalty(Builtin):
    """Takes a penalty off the logit of each token that the row has generated, however often (OpenAI's definition).

    Only generated tokens count, not the prompt's, as with OpenAI and vLLM. With ``prompt_lengths=0`` the prompt counts.

    Attributes:
        penalty: float32 ``[]`` or ``[batch]``; below 0 it encourages.
        prompt_lengths: int32 ``[]`` or ``[batch]``, the tokens of each row that are not generated. None: those of the
            run that it is used in (:meth:`Processors.bind`).
    """

    penalty: Any
    prompt_lengths: Any = None
    KINDS: ClassVar = {"penalty": NUMBER, "prompt_lengths": COUNT}

    def __call__(self, logits: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """float32 ``[batch, vocab]``."""
        generated = _counts(tokens, lengths, _bound(self, "prompt_lengths"), logits.shape[1])
        return jnp.where(generated > 0, logits - _per_row(self.penalty, jnp.float32), logits)


class FrequencyPenalty(Builtin):
    """Takes a penalty off a token's logit once for each time that the row has generated it (OpenAI's definition).

    Only generated tokens count, as for :class:`PresencePenalty`, of which this has the attributes.
    """

    penalty: Any
    prompt_lengths: Any = None
    KINDS: ClassVar = {"penalty": NUMBER, "prompt_lengths": COUNT}

    def __call__(self, logits: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """float32 ``[batch, vocab]``."""
        generated = _counts(tokens, lengths, _bound(self, "prompt_lengths"), logits.shape[1])
        return logits - generated.astype(jnp.float32) * _per_row(self.penalty, jnp.float32)


class NoRepeatNgram(Builtin):
    """Forbids each token that would repeat a sequence of ``size`` tokens of the text so far, prompt included.

    Attributes:
        size: static, at least 1; 1 forbids every token that the text already has.
    """

    size: int = flax.struct.field(pytree_node=False)

    def __call__(self, logits: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """float32 ``[batch, vocab]``."""
        slots, before = tokens.shape[1], self.size - 1
        if slots < self.size:
            return logits
        # Rows shorter than that have no token that ``_written`` leaves below.
        last = jnp.maximum(lengths[:, None] - before + np.arange(before), 0)
        last = jnp.take_along_axis(tokens, last, axis=1)
        repeats = jnp.ones((tokens.shape[0], slots - before), bool)
        for index in range(before):
            repeats &= tokens[:, index : slots - before + index] == last[:, index, None]
        followers = _written(tokens, lengths, 0)[:, before:]
        return _forbid(logits, jnp.where(repeats, followers, NO_TOKEN))


class LogitBias(Builtin):
    """Adds to the logits of some tokens; what is given for the same token twice adds up.

    Attributes:
        ids: int32 ``[n]`` or ``[batch, n]``, -1 for none.
        values: float32 ``[n]`` or ``[batch, n]``; -inf forbids.
    """

    ids: Any
    values: Any
    KINDS: ClassVar = {"ids": IDS, "values": BIASES}

    def __call__(self, logits: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """float32 ``[batch, vocab]``."""
        values = jnp.broadcast_to(jnp.asarray(self.values, jnp.float32), (len(logits), np.shape(self.values)[-1]))

        def add(row: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
            return row.at[ids].add(values, mode="drop")

        return jax.vmap(add)(logits, _targets(self.ids, logits), values)


class ForbiddenIds(Builtin):
    """Forbids some tokens.

    Attributes:
        ids: int32 ``[n]`` or ``[batch, n]``, -1 for none.
    """

    ids: Any
    KINDS: ClassVar = {"ids": IDS}

    def __call__(self, logits: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """float32 ``[batch, vocab]``."""
        return _forbid(logits, self.ids)


class MinNewTokens(Builtin):
    """Forbids the tokens that end a row until it has so many new ones.

    Attributes:
        count: int32 ``[]`` or ``[batch]``, at least 0; the end may come after so many tokens.
        eos_token_id: int32 ``[n]`` or ``[batch, n]`` (or one id), -1 for none. None: those of the run.
        prompt_lengths: int32 ``[]`` or ``[batch]``, tokens of each row that are not new. None: those of the run
            (:meth:`Processors.bind`).
    """

    count: Any
    eos_token_id: Any = None
    prompt_lengths: Any = None
    KINDS: ClassVar = {"count": COUNT, "eos_token_id": IDS, "prompt_lengths": COUNT}

    def __call__(self, logits: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """float32 ``[batch, vocab]``."""
        new = lengths[:, None] - _per_row(_bound(self, "prompt_lengths"), jnp.int32)
        eos = jnp.asarray(_bound(self, "eos_token_id"), jnp.int32)
        return _forbid(logits, jnp.where(new < _per_row(self.count, jnp.int32), eos, NO_TOKEN))


class Processors(flax.struct.PyTreeNode):
    """Processors one after the other, as one; :func:`compose` makes it.

    A pytree, to be an argument of a jitted function: the values of its members are leaves, plain functions are static.

    Attributes:
        members: what is applied, first to last; none changes nothing.
    """

    members: tuple[Any, ...]

    def __call__(self, logits: jax.Array, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        """float32 ``[batch, vocab]``: the last one's result."""
        for member in self.members:
            logits = member(logits, tokens, lengths)
        return logits

    def bind(self, prompt_lengths: Any, eos_token_id: Any) -> Processors:
        """The same, where members left ``prompt_lengths`` or ``eos_token_id`` None with those of a run.

        Members that are a ``flax.struct.PyTreeNode`` of the caller's own with fields of these names get them as well.

        Args:
            prompt_lengths: int32 ``[batch]``.
            eos_token_id: int32 ``[batch, count]``, filled up with -1.
        """
        run = dict(zip(_OF_THE_RUN, (prompt_lengths, eos_token_id), strict=True))

        def bound(member: Any) -> Any:
            if isinstance(member, Shared):
                member = member.value
            if not isinstance(member, flax.struct.PyTreeNode):
                return member
            return member.replace(**{k: v for k, v in run.items() if getattr(member, k, v) is None})

        return Processors(tuple(map(bound, self.members)))

    def to_rows(self, batch: int) -> Processors:
        """The same as a part of a batch's rows: every array of the ready processors is ``[batch, ...]``.

        Arrays in pytrees of the caller's own stay as they are, for all rows, until ``bind``.
        """

        def rows(name: str, value: Any, kind: Kind) -> Any:
            if np.ndim(value) > kind.rank:
                return value
            xp: Any = jnp if isinstance(value, jax.Array) else np
            return xp.broadcast_to(value, (batch, *np.shape(value)))

        def member_rows(member: Any) -> Any:
            own = not isinstance(member, Builtin | Shared) and jax.tree.leaves(member)
            return Shared(member) if own else map_values(rows, member)

        return Processors(tuple(map(member_rows, self.members)))


def compose(processors: Processor | Iterable[Processor]) -> Processors:
    """Several processors as one, applied from the first to the last.

    Values become arrays of their dtype, so that 1, 1.0 and ``np.array(1.0)`` share a program. A plain function is
    static: the same function shares a program, a ``lambda`` made anew for each call compiles anew; what it closes over
    is a constant. For traced values of one's own, write a ``flax.struct.PyTreeNode`` with a ``__call__``.

    Args:
        processors: one or several.

    Raises:
        TypeError: one that is no function.
        ValueError: a value that is no number, or no int32 where ids or counts are expected.

    Example:
        >>> processor = compose([RepetitionPenalty(1.2), NoRepeatNgram(3)])
        >>> logits = processor(logits, tokens, lengths)
    """
    if not isinstance(processors, Iterable):
        processors = (processors,)
    members = []
    for index, given in enumerate(processors):
        if isinstance(given, Processors):
            members += given.members
        else:
            members.append(_member(f"processors[{index}]", given))
    return Processors(tuple(members))


def _member(name: str, given: Any) -> Any:
    """One processor as a pytree whose leaves are arrays."""
    if isinstance(given, type):
        raise TypeError(f"{name}: expected {SIGNATURE}, got the class {given.__name__}, not one made of it")
    if not callable(given):
        raise TypeError(f"{name}: expected {SIGNATURE}, got {given!r}")
    if isinstance(given, NoRepeatNgram):
        return given.replace(size=check_int("NoRepeatNgram.size", given.size, 1))
    if isinstance(given, Builtin):
        return map_values(_as_leaf, given)
    if not jax.tree_util.all_leaves([given]):
        return given
    try:
        hash(given)
    except TypeError:
        raise TypeError(
            f"{name}: expected {SIGNATURE} that is hashable, since programs depend on it, or a pytree; "
            f"got {type(given).__name__}"
        ) from None
    return jax.tree_util.Partial(given)


def map_values(function: Callable[[str, Any, Kind], Any], member: Any) -> Any:
    """A ready processor with ``function(name, value, kind)`` of each value that is given; others as they are."""
    if not isinstance(member, Builtin):
        return member
    found = {}
    for field, kind in member.KINDS.items():
        value = getattr(member, field)
        if value is not None or field not in _OF_THE_RUN:
            found[field] = function(f"{type(member).__name__}.{field}", value, kind)
    return member.replace(**found)


def _as_leaf(name: str, value: Any, kind: Kind) -> Any:
    """An array of the kind's dtype, NumPy's where it is concrete."""
    real = kind.dtype is np.float32
    array = as_array(name, value, "iuf" if real else "iu", "numbers" if real else "integers")
    if not is_traced(array) and not real and array.size:
        limits = np.iinfo(np.int32)
        if array.min() < limits.min or array.max() > limits.max:
            raise ValueError(f"{name}: expected int32, got {array.tolist()}")
    with np.errstate(over="ignore"):  # to inf, which is refused
        array = array.astype(kind.dtype)
    return array[None] if kind.rank == 1 and array.ndim == 0 else array


def _bound(member: Any, field: str) -> Any:
    value = getattr(member, field)
    if value is None:
        raise ValueError(
            f"{type(member).__name__}.{field}: expected a value, got None, which stands for that of a run: "
            "give it, or bind() it"
        )
    return value


def _per_row(value: Any, dtype: Any) -> jax.Array:
    """``[]`` as it is, ``[batch]`` as ``[batch, 1]``."""
    value = jnp.asarray(value, dtype)
    return value[:, None] if value.ndim else value


def _written(tokens: jax.Array, lengths: jax.Array, start: Any) -> jax.Array:
    """``tokens`` with -1 outside each row's positions ``[start, lengths)``."""
    position = np.arange(tokens.shape[1], dtype=np.int32)
    inside = (position >= _per_row(start, jnp.int32)) & (position < lengths[:, None])
    return jnp.where(inside, tokens, NO_TOKEN)


def _targets(ids: Any, logits: jax.Array) -> jax.Array:
    """Ids ``[n]`` or ``[batch, n]`` as columns int32 ``[batch, n]`` of the logits; -1 becomes one that is dropped."""
    batch, vocab = logits.shape
    ids = jnp.atleast_1d(jnp.asarray(ids, jnp.int32))  # negative indices would count from the end
    return jnp.broadcast_to(jnp.where(ids < 0, vocab, ids), (batch, ids.shape[-1]))


def _forbid(logits: jax.Array, ids: Any) -> jax.Array:
    # Mapped over rows, as every scatter here: the compiler then knows that rows are apart, and can shard them.
    def forbid(row: jax.Array, ids: jax.Array) -> jax.Array:
        return row.at[ids].set(-jnp.inf, mode="drop")

    return jax.vmap(forbid)(logits, _targets(ids, logits))


def _counts(tokens: jax.Array, lengths: jax.Array, start: Any, vocab: int) -> jax.Array:
    """int32 ``[batch, vocab]``: how often each token stands at a row's positions ``[start, lengths)``."""
    nothing = jnp.zeros((tokens.shape[0], vocab), jnp.int32)

    def count(row: jax.Array, ids: jax.Array) -> jax.Array:
        return row.at[ids].add(1, mode="drop")

    return jax.vmap(count)(nothing, _targets(_written(tokens, lengths, start), nothing))
