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

    Float16 and bfloat16 on CPUs: for one row, and for results in 16 bits, XLA would multiply a float32 copy of the
    whole weight, made outside the loop and held throughout it; it reads the weight as it is only for two rows or more
    and results in float32, and fastest for four. So fewer rows are filled up with zeros there, at the cost of reading
    the weight once. And both are matrices: of more axes XLA may make one by a transposed copy.

    Args:
        x: the input.
        weight: of the same dtype.
        transposed: which axis of the weight is multiplied.
        dtype: of the result, and of its accumulation at least; None: as XLA has it for ``x``.
    """
    width, features = x.shape[-1], weight.shape[:-1] if transposed else weight.shape[1:]
    rows = x.reshape(-1, width)
    matrix = weight.reshape((-1, width) if transposed else (width, -1))
    narrow = weight.dtype.itemsize == 2 and on_cpu()
    count = rows.shape[0]
    if narrow and count < _LEAST_ROWS:
        rows = jnp.pad(rows, ((0, _LEAST_ROWS - count), (0, 0)))
    dimensions = (((1,), (1 if transposed else 0,)), ((), ()))
    out = lax.dot_general(rows, matrix, dimensions, preferred_element_type=jnp.float32 if narrow else dtype)
    return out[:count].reshape(*x.shape[:-1], *features).astype(x.dtype if dtype is None else dtype)


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
