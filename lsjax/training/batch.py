"""A batch of training data: rows of packed documents."""

from __future__ import annotations

from typing import Any, NamedTuple

IGNORED = -100  # the label of a position that has none, as in torch and transformers


class Batch(NamedTuple):
    """Rows of tokens with what follows each of them; arrays of NumPy or JAX, a pytree.

    Attributes:
        tokens: int32 ``[rows, length]``.
        labels: int32 ``[rows, length]``, the token to be predicted after each position; -100: none.
        documents: int32 ``[rows, length]``, the number in its row of the document that a position belongs to. Positions
            attend only to their own document.
        positions: int32 ``[rows, length]``, the place in its document, from 0.
    """

    tokens: Any
    labels: Any
    documents: Any
    positions: Any
