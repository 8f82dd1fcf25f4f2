"""How a token is chosen from logits, and how many drafts are accepted."""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lsjax.checks import is_traced
from lsjax.model.projection import on_cpu

# What a position's key is used for; one and the same number decides no two things.
_DRAFT, _ACCEPT, _TARGET = range(3)
_FEW = 32  # of the most probable tokens, taken one after the other


class Sampling(flax.struct.PyTreeNode):
    """How each row draws its tokens; what is None is no part of the program.

    Attributes:
        key: typed PRNG keys ``[batch]``, of which every draw's is made by its absolute position in the row.
        temperature: float32 ``[batch]``, at least 0; 0 is greedy.
        top_k: int32 ``[batch]``, at least 1.
        top_p: float32 ``[batch]``, in (0, 1].
        min_p: float32 ``[batch]``, in [0, 1].
        greedy_drafts: static; whether drafts are the early layers' most probable tokens instead of drawn ones.
    """

    key: jax.Array
    temperature: jax.Array | None = None
    top_k: jax.Array | None = None
    top_p: jax.Array | None = None
    min_p: jax.Array | None = None
    greedy_drafts: bool = flax.struct.field(pytree_node=False, default=False)

    def filter(self, logits: jax.Array) -> jax.Array:
        """Logits of the distribution that is drawn from: scaled, and -inf where it is 0.

        In transformers' order and with its bounds: temperature; top-k, which keeps all tokens that equal the k-th; of
        what is left the most probable tokens until they hold ``top_p`` together, the one that reaches it included, and
        among equals the higher ids first; then those at least ``min_p`` times as probable as the most probable one.

        Args:
            logits: float32 ``[batch, vocab]`` or ``[batch, length, vocab]``.
        """

        def each(option: jax.Array) -> jax.Array:
            return option.reshape(-1, *[1] * (logits.ndim - 1))

        found = logits
        if self.temperature is not None:
            temperature = each(self.temperature)
            found = found / jnp.where(temperature > 0, temperature, 1)
        if self.top_k is not None or self.top_p is not None:
            found = _cut_tail(found, *(None if x is None else each(x) for x in (self.top_k, self.top_p)))
        if self.min_p is not None:
            relative = jnp.exp(found - found.max(axis=-1, keepdims=True))
            found = jnp.where(relative >= each(self.min_p), found, -jnp.inf)
        if self.temperature is not None:
            best = jnp.arange(logits.shape[-1]) == greedy(logits)[..., None]
            found = jnp.where(each(self.temperature) > 0, found, jnp.where(best, 0.0, -jnp.inf))
        return found

    def draw(self, logits: jax.Array, positions: jax.Array, use: int = _TARGET) -> jax.Array:
        """A token of each row's distribution (the Gumbel-max trick): int32 ``[batch]``.

        Args:
            logits: float32 ``[batch, vocab]``, unnormalised.
            positions: int32 ``[batch]``, where the tokens will stand.
            use: which of a position's draws this is.
        """
        keys = self._keys(positions, use)
        noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(keys)
        return greedy(logits + noise)

    def draw_draft(self, logits: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """A draft and the distribution that it was drawn from, float32 ``[batch, vocab]``; None: it was greedy."""
        if self.greedy_drafts:
            return greedy(logits), None
        filtered = self.filter(logits)
        return self.draw(filtered, positions, _DRAFT), jax.nn.softmax(filtered)

    def accept(
        self,
        drafts: jax.Array,
        drafted: jax.Array | None,
        logits: jax.Array,
        counts: jax.Array,
        start: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Speculative sampling (arXiv 2211.17192, algorithm 1; 2302.01318, algorithm 2).

        A draft x is kept with probability min(1, p(x) / q(x)). At the first that is not, a token of max(p - q, 0),
        normalised, takes its place; where all are kept, a token of p follows. So what is written is distributed as p,
        whatever q is.

        Args:
            drafts: int32 ``[batch, K]``.
            drafted: float32 ``[batch, K, vocab]``, the distributions q that the drafts were drawn from; None: greedy
                drafts, where q is 1 at the draft.
            logits: float32 ``[batch, K + 1, vocab]`` of the full model.
            counts: int32 ``[batch]``, how many of the drafts each row may use.
            start: int32 ``[batch]``, the position of the first draft.

        Returns:
            drafts kept, int32 ``[batch]``, 0..counts; and the tokens written after them, int32 ``[batch, K + 1]``: the
            kept drafts and one more, which is valid up to that one.
        """
        width = drafts.shape[1]
        slot = jnp.arange(width)
        filtered = self.filter(logits)
        target = jax.nn.softmax(filtered)
        if width == 0:
            return jnp.zeros_like(counts), self.draw(filtered[:, 0], start)[:, None]
        here = drafts[..., None]
        ahead = jnp.take_along_axis(target[:, :width], here, axis=-1)[..., 0]
        behind = 1.0 if drafted is None else jnp.take_along_axis(drafted, here, axis=-1)[..., 0]
        uniform = jax.vmap(lambda row: self._uniform(start + row), out_axes=1)(slot)
        kept = (uniform * behind < ahead) & (slot < counts[:, None])
        accepted = jnp.cumprod(kept.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)

        def at(x: jax.Array, index: jax.Array) -> jax.Array:
            return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]

        last = jnp.minimum(accepted, width - 1)
        p = at(target, accepted)
        if drafted is None:
            q = jax.nn.one_hot(jnp.take_along_axis(drafts, last[:, None], axis=1)[:, 0], p.shape[-1])
        else:
            q = at(drafted, last)
        rest = jnp.maximum(p - q, 0)
        # Where rounding leaves nothing, p and q are the same.
        rejected = (accepted < counts) & (rest.sum(axis=-1) > 0)
        left = jnp.where(rejected[:, None], jnp.log(rest), at(filtered, accepted))
        extra = self.draw(left, start + accepted)
        padded = jnp.pad(drafts, ((0, 0), (0, 1)))
        return accepted, jnp.where(jnp.arange(width + 1) == accepted[:, None], extra[:, None], padded)

    def _uniform(self, positions: jax.Array) -> jax.Array:
        return jax.vmap(jax.random.uniform)(self._keys(positions, _ACCEPT))

    def _keys(self, positions: jax.Array, use: int) -> jax.Array:
        return jax.vmap(lambda key, position: jax.random.fold_in(jax.random.fold_in(key, position), use))(
            self.key, positions
        )


def greedy(logits: jax.Array) -> jax.Array:
    """float32 ``[..., vocab]`` to int32 ``[...]``: the most probable token, the lowest id among equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def accept_greedy(drafts: jax.Array, targets: jax.Array, counts: jax.Array) -> jax.Array:
    """How many drafts the full model would have written itself: the longest matching prefix.

    Args:
        drafts: int32 ``[batch, K]``.
        targets: int32 ``[batch, K + 1]``, the full model's own choice at each of these positions and after the last.
        counts: int32 ``[batch]``, how many of the drafts each row may use.

    Returns:
        int32 ``[batch]``, 0..counts.
    """
    width = drafts.shape[1]
    matches = (drafts == targets[:, :width]) & (jnp.arange(width) < counts[:, None])
    return jnp.cumprod(matches.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def most_probable(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest of finite logits ``[..., vocab]``, falling, and their ids, the lowest first among equals.

    Args:
        logits: float32.
        count: static; how many.

    Returns:
        float32 and int32 ``[..., count]``.
    """
    if count > _FEW or not on_cpu():
        found, ids = lax.top_k(logits, count)
        return found, ids.astype(jnp.int32)
    # CPUs would sort all of it. What comes after the last one found is told without a copy.
    column, found, ids = jnp.arange(logits.shape[-1]), [], []
    rest = logits
    for _ in range(count):
        ids.append(greedy(rest)[..., None])
        found.append(jnp.take_along_axis(logits, ids[-1], axis=-1))
        after = (logits < found[-1]) | ((logits == found[-1]) & (column > ids[-1]))
        rest = jnp.where(after, logits, -jnp.inf)
    return jnp.concatenate(found, axis=-1), jnp.concatenate(ids, axis=-1)


def _cut_tail(logits: jax.Array, top_k: jax.Array | None, top_p: jax.Array | None) -> jax.Array:
    """-inf for the less probable tokens.

    Where the cut is, is searched bit by bit: 32 looks at the logits take a twentieth of the time of sorting them.
    """
    keys = _in_order(logits)
    if top_k is not None:
        kth = _largest(lambda key: (keys >= key).sum(axis=-1, keepdims=True) >= top_k, top_k.shape, logits)
        logits = jnp.where(keys >= kth, logits, -jnp.inf)
        keys = _in_order(logits)
    if top_p is not None:
        # From the least probable on: those that come to no more than 1 - top_p together are left out.
        probs, left_out = jax.nn.softmax(logits), 1 - top_p

        def mass(some: jax.Array) -> jax.Array:
            return jnp.where(some, probs, 0).sum(axis=-1, keepdims=True)

        last = _largest(lambda key: mass(keys < key) <= left_out, top_p.shape, logits)
        last = jnp.minimum(last, keys.max(axis=-1, keepdims=True))  # the most probable token stays
        # Of tokens that equal the last of these, the lower ids go first, as far as 1 - top_p allows.
        ids, equal = jnp.arange(logits.shape[-1], dtype=jnp.uint32), keys == last
        below, last_id = mass(keys < last), jnp.where(equal, ids, 0).max(axis=-1, keepdims=True)
        first = _largest(lambda key: below + mass(equal & (ids < key)) <= left_out, top_p.shape, logits)
        kept = (keys > last) | (equal & (ids >= jnp.minimum(first, last_id)))
        logits = jnp.where(kept, logits, -jnp.inf)
    return logits


def _in_order(x: jax.Array) -> jax.Array:
    """float32 to uint32 in the same order, the two zeros alike."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _largest(holds: Any, shape: tuple[int, ...], logits: jax.Array) -> jax.Array:
    """The largest uint32 for which a condition holds that holds for 0 and, from some number on, no more.

    ``holds`` maps ``[..., 1]`` to the same; ``shape`` broadcasts to it.
    """

    def bit(index: jax.Array, found: jax.Array) -> jax.Array:
        more = found | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(holds(more), more, found)

    shape = jnp.broadcast_shapes(shape, (*logits.shape[:-1], 1))
    return lax.fori_loop(0, 32, bit, jnp.zeros(shape, jnp.uint32))


def make_sampling(
    batch: int,
    *,
    key: Any = None,
    temperature: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    greedy_drafts: bool = False,
) -> Sampling | None:
    """What a caller asks for, checked, one value a row; None: greedy decoding.

    Args:
        batch: rows.
        key: a PRNG key (typed, or raw as of ``jax.random.PRNGKey``), of which row i uses ``fold_in(key, i)``, or
            ``[batch]`` of them.
        temperature: a number or ``[batch]`` of them, like the rest.
        top_k: more than the vocabulary: nothing is cut off.
        top_p: likewise.
        min_p: likewise.
        greedy_drafts: as of :class:`Sampling`.

    Raises:
        ValueError: a value that makes no distribution, or sampling without a key.
    """
    options = {
        "temperature": row_values("temperature", temperature, batch, "a finite number of at least 0", _is_temperature),
        "top_k": row_values("top_k", top_k, batch, "an int of at least 1", lambda x: x >= 1, np.int32),
        "top_p": row_values("top_p", top_p, batch, "a number above 0, at most 1", lambda x: (x > 0) & (x <= 1)),
        "min_p": row_values("min_p", min_p, batch, "a number in 0..1", lambda x: (x >= 0) & (x <= 1)),
    }
    if not isinstance(greedy_drafts, bool):
        raise ValueError(f"greedy_drafts: expected True or False, got {greedy_drafts!r}")
    given = options["temperature"]
    if key is None:
        always_greedy = given is not None and not is_traced(given) and not given.any()
        if always_greedy or all(option is None for option in options.values()):
            return None
        names = ", ".join(name for name, option in options.items() if option is not None)
        raise ValueError(f"key: expected a PRNG key, such as jax.random.key(0), to sample with {names}; got None")
    return Sampling(_row_keys(key, batch), **options, greedy_drafts=greedy_drafts)


def _is_temperature(x: Any) -> Any:
    return (x >= 0) & (x < math.inf)


def row_values(name: str, value: Any, batch: int, expected: str, is_good: Any, dtype: Any = np.float32) -> Any:
    """A number or ``[batch]`` of them as one value a row, NumPy where it is concrete; None stays.

    Args:
        name: the option's.
        value: what the caller gave.
        batch: rows.
        expected: what concrete values must be, in words.
        is_good: the same as a function of an array.
        dtype: float32, or int32, to which larger integers are cut.
    """
    if value is None:
        return None
    if is_traced(value):
        found = jnp.asarray(value)
    else:
        try:
            found = np.asarray(value)
        except ValueError:
            found = np.asarray(value, object)
    kinds = "iu" if dtype == np.int32 else "iuf"
    whole = found.dtype.kind in kinds or found.dtype == jnp.bfloat16
    if not whole or found.shape not in ((), (batch,)):
        raise ValueError(f"{name}: expected {expected}, or one for each of {batch} rows, got {value!r}")
    if not is_traced(found) and not is_good(found).all():
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    xp: Any = jnp if is_traced(found) else np
    if dtype == np.int32:
        found = xp.minimum(found, np.iinfo(np.int32).max)
    return xp.broadcast_to(found.astype(dtype), (batch,))


def _row_keys(key: Any, batch: int) -> Any:
    """One typed key for each row."""
    expected = f"a PRNG key, such as jax.random.key(0), or one for each of {batch} rows"
    if not isinstance(key, jax.Array | np.ndarray):
        raise ValueError(f"key: expected {expected}, got {key!r}")
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        try:
            key = jax.random.wrap_key_data(jnp.asarray(key))
        except (TypeError, ValueError) as error:
            raise ValueError(f"key: expected {expected}, got {key.dtype}{list(key.shape)}") from error
    if key.shape == (batch,):
        return key
    if key.shape != ():
        raise ValueError(f"key: expected {expected}, got keys of shape {list(key.shape)}")
    return _fold_in_rows(key, np.arange(batch, dtype=np.int32))


@jax.jit
def _fold_in_rows(key: jax.Array, rows: jax.Array) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, rows)
