"""Matrix products with weights, each in the form that its backend runs best."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax import lax


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
    and results in float32. So one row is computed twice there, at the cost of reading the weight once.

    Args:
        x: the input.
        weight: of the same dtype.
        transposed: which axis of the weight is multiplied.
        dtype: of the result, and of its accumulation at least; None: as XLA has it for ``x``.
    """
    narrow = weight.dtype.itemsize == 2 and on_cpu()
    one_row = narrow and math.prod(x.shape[:-1]) == 1
    rows = jnp.concatenate([x.reshape(1, -1)] * 2) if one_row else x
    dimensions = (((rows.ndim - 1,), (weight.ndim - 1 if transposed else 0,)), ((), ()))
    accumulated = jnp.float32 if narrow else dtype
    out = lax.dot_general(rows, weight, dimensions, preferred_element_type=accumulated)
    out = out[:1].reshape(*x.shape[:-1], *out.shape[1:]) if one_row else out
    return out.astype(x.dtype if dtype is None else dtype)


def on_cpu() -> bool:
    """Whether programs run on the CPU, unless told otherwise: XLA compiles some forms well there, others elsewhere."""
    return jax.default_backend() == "cpu"
