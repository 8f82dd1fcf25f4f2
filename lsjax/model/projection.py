"""What reads weights: matrix products and rows of a table, each in the form that its backend runs best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax import lax

_LEAST_ROWS = 4  # of 16-bit products on CPUs
_FEW_ROWS = 32  # up to which CPUs multiply a wide weight by the rows faster than the rows by the weight
_FEW_ROWS_16 = 16  # the same for 16 bits and any width
_WIDE = 768


class Projection(nn.Module):
    """A linear layer over the last axis.

    Its parameter is ``kernel`` ``[in, *features]``, as in Flax's own dense layers, or, with ``transposed``, ``weight``
    ``[*features, in]``: each output's numbers side by side, which CPUs read faster for more than one position.
    """

    features: tuple[int, ...]
    kernel_init: Callable[..., jax.Array]
    use_bias: bool = False
    transposed: bool = False
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., in]`` to ``[..., *features]``."""
        width = x.shape[-1]
        if self.transposed:
            weight = self.param("weight", self.kernel_init, (*self.features, width), self.param_dtype)
        else:
            weight = self.param("kernel", self.kernel_init, (width, *self.features), self.param_dtype)
        bias = self.param("bias", nn.initializers.zeros, self.features, self.param_dtype) if self.use_bias else None
        x, weight, bias = promote_dtype(x, weight, bias)
        out = dot(x, weight, transposed=self.transposed)
        return out if bias is None else out + bias


def dot(x: jax.Array, weight: jax.Array, *, transposed: bool, dtype: Any = None) -> jax.Array:
    """``[..., in]`` times ``[in, *features]`` or, transposed, ``[*features, in]``, to ``[..., *features]``.

    On CPUs the form matters. All are matrices: of more axes XLA may make one by a transposed copy. A few rows times a
    large weight are made as the weight times their transpose: XLA's matrix product arranges its second operand anew
    before it begins, which costs more than the product where that is the weight.

    Float16 and bfloat16 there: for one row, and for results in 16 bits, XLA would multiply a float32 copy of the
    whole weight, made outside the loop and held throughout it; it reads the weight as it is only for two rows or more
    and results in float32, and fastest for four. So fewer rows are filled up with zeros there, at the cost of reading
    the weight once.

    Args:
        x: the input.
        weight: of the same dtype.
        transposed: which axis of the weight is multiplied.
        dtype: of the result, and of its accumulation at least; None: as XLA has it for ``x``.
    """
    width, features = x.shape[-1], weight.shape[:-1] if transposed else weight.shape[1:]
    rows = x.reshape(-1, width)
    matrix = weight.reshape((-1, width) if transposed else (width, -1))
    count, cpu = rows.shape[0], on_cpu()
    narrow = cpu and weight.dtype.itemsize == 2
    weight_first = cpu and transposed and _weight_first(count, width, narrow)
    if (filled := _fill(count, narrow, weight_first)) > count:
        rows = jnp.pad(rows, ((0, filled - count), (0, 0)))
    accumulation = jnp.float32 if narrow else dtype
    if weight_first:
        out = lax.dot_general(matrix, rows, (((1,), (1,)), ((), ())), preferred_element_type=accumulation)
        out = lax.optimization_barrier(out).T  # or XLA swaps the operands to save the transposition
    else:
        dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
        out = lax.dot_general(rows, matrix, dimensions, preferred_element_type=accumulation)
    return out[:count].reshape(*x.shape[:-1], *features).astype(x.dtype if dtype is None else dtype)


def _weight_first(count: int, width: int, narrow: bool) -> bool:
    if narrow and count <= _FEW_ROWS_16:
        return True
    return 1 < count <= _FEW_ROWS and width >= _WIDE


def _fill(count: int, narrow: bool, weight_first: bool) -> int:
    """How many rows are multiplied for ``count`` on CPUs: those that take less time than ``count`` do."""
    if narrow:
        return max(count, _LEAST_ROWS)
    if weight_first and 4 < count < 16:
        return 8 if count <= 8 else 16
    return count


def take_outputs(weight: jax.Array, first: jax.Array | int, count: int | None, *, transposed: bool) -> jax.Array:
    """The part of a matrix ``[in, out]`` or, transposed, ``[out, in]`` that makes ``count`` outputs from ``first`` on.

    None: all of it, whatever ``first``. In 16 bits on CPUs from within a conditional, as :func:`lookup` reads.
    """
    axis = 0 if transposed else 1
    if count is None or count == weight.shape[axis]:
        return weight

    def take() -> jax.Array:
        return lax.dynamic_slice_in_dim(weight, first, count, axis)

    if weight.dtype.itemsize != 2 or not on_cpu():
        return take()
    return lax.cond(jnp.asarray(first) >= 0, take, lambda: lax.slice_in_dim(weight, 0, count, axis=axis))


def lookup(table: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of a table ``[rows, width]`` by their numbers ``[...]``, to ``[..., width]``; a number past an end reads it.

    XLA's CPU backend has no gather of float16 and bfloat16: it reads rows of the table in float32, a conversion that
    costs nothing where it is, but outside a loop, whither XLA moves it, makes and holds all of it. It moves nothing out
    of a conditional.
    """

    def take() -> jax.Array:
        return jnp.take(table, rows, axis=0, mode="clip")

    if table.dtype.itemsize != 2 or not on_cpu():
        return take()
    return lax.cond(jnp.max(rows) >= 0, take, lambda: jnp.broadcast_to(table[0], (*rows.shape, table.shape[1])))


def on_cpu() -> bool:
    """Whether programs run on the CPU, unless told otherwise: XLA compiles some forms well there, others elsewhere."""
    return jax.default_backend() == "cpu"
