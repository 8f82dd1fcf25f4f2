"""Documents in rows of one length, and batches of these rows in an order that a seed and a step decide."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
from collections.abc import Sequence

import numpy as np

from lsjax.checks import check_int
from lsjax.training.batch import IGNORED, Batch
from lsjax.training.documents import Document


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Packed documents.

    Attributes:
        tokens: int32 ``[rows, length]``.
        labels: int32 ``[rows, length]``, what follows each token in its document; -100 where nothing is learned.
        documents: int32 ``[rows, length]``, the number in its row of the document of each position, from 1; 0 is
            padding.
        truncated: examples that were longer than a row, and lost their end.
    """

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.tokens)

    @functools.cached_property
    def num_labels(self) -> int:
        """Positions whose next token is learned."""
        return int((self.labels != IGNORED).sum())

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of all of it, by which other data are known."""
        digest = hashlib.sha256()
        for array in (self.tokens, self.labels, self.documents):
            digest.update(repr(array.shape).encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    def take(self, rows: Sequence[int] | np.ndarray) -> Batch:
        """Some rows, in the order given."""
        documents = self.documents[rows]
        place = np.arange(documents.shape[1], dtype=np.int32)
        begins = np.diff(documents, axis=1, prepend=-1) != 0
        positions = place - np.maximum.accumulate(np.where(begins, place, 0), axis=1)
        return Batch(self.tokens[rows], self.labels[rows], documents, positions)

    def batch(self, step: int, batch_size: int, seed: int) -> Batch:
        """The rows of one step: all rows in a random order, then all of them in another, and so on.

        Args:
            step: counted from 0; the batch depends on no earlier one.
            batch_size: rows.
            seed: of the orders.
        """
        wanted = range(step * batch_size, (step + 1) * batch_size)
        return self.take(np.array([_order(len(self), index // len(self), seed)[index % len(self)] for index in wanted]))


@functools.lru_cache(maxsize=4)
def _order(rows: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(rows)


def pack(documents: Sequence[Document], length: int) -> Rows:
    """Puts documents into rows.

    Texts follow each other without a gap and go on in the next row where one ends; only the last row is filled up.
    There the rest of a text is a document of its own: it does not see what came before. Examples are not split: each
    goes into the fullest row that has room for it (best fit, the longest first), and only one that is longer than a row
    loses its end. No document sees another, and none predicts another's first token.

    Args:
        documents: at least one.
        length: positions of a row.

    Raises:
        ValueError: documents without anything to learn.
    """
    length = check_int("sequence_length", length, 1)
    texts = [document for document in documents if document.learned is None and len(document.tokens) > 1]
    examples = [document for document in documents if document.learned is not None and len(document.tokens) > 1]
    parts = [fill(part, length) for fill, part in ((_pack_texts, texts), (_pack_examples, examples)) if part]
    if not any(part.num_labels for part in parts):
        raise ValueError("data: expected documents of at least two tokens with something to learn, got none")
    arrays = (np.concatenate([getattr(part, name) for part in parts]) for name in ("tokens", "labels", "documents"))
    return Rows(*arrays, truncated=sum(part.truncated for part in parts))


def _pack_texts(texts: Sequence[Document], length: int) -> Rows:
    sizes = [len(text.tokens) - 1 for text in texts]
    count = -(-sum(sizes) // length)

    def fill(pieces: Sequence[np.ndarray], rest: int) -> np.ndarray:
        flat = np.full(count * length, rest, np.int32)
        flat[: sum(sizes)] = np.concatenate(pieces)
        return flat.reshape(count, length)

    numbers = fill([np.repeat(np.arange(len(sizes)), sizes)], -1)  # over all rows
    documents = np.cumsum(np.diff(numbers, axis=1, prepend=-2) != 0, axis=1, dtype=np.int32)
    documents[numbers < 0] = 0
    return Rows(
        fill([text.tokens[:-1] for text in texts], 0), fill([text.tokens[1:] for text in texts], IGNORED), documents
    )


def _pack_examples(examples: Sequence[Document], length: int) -> Rows:
    sizes = np.array([min(len(example.tokens) - 1, length) for example in examples])
    held: list[list[int]] = []
    free: list[tuple[int, int]] = []  # of each row that has room, and its number, in that order
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        at = bisect.bisect_left(free, (size, -1))
        room, row = free.pop(at) if at < len(free) else (length, len(held))
        if row == len(held):
            held.append([])
        held[row].append(index)
        if room > size:
            bisect.insort(free, (room - size, row))
    tokens, labels, documents = (np.full((len(held), length), fill, np.int32) for fill in (0, IGNORED, 0))
    for row, indices in enumerate(held):
        begin = 0
        for number, index in enumerate(indices, start=1):
            example, span = examples[index], slice(begin, begin + int(sizes[index]))
            here = slice(0, int(sizes[index]))
            tokens[row, span] = example.tokens[here]
            labels[row, span] = np.where(example.learned[1:], example.tokens[1:], IGNORED)[here]  # type: ignore[index]
            documents[row, span] = number
            begin = span.stop
    return Rows(tokens, labels, documents, sum(len(example.tokens) - 1 > length for example in examples))
