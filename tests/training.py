"""What the tests of training share: a small model, packed batches, and its losses in NumPy float64."""

from __future__ import annotations

import dataclasses

import numpy as np
from checkpoints import model_config
from support import NumpyLlama, random_params

import lsjax
from lsjax.training.batch import IGNORED, Batch

LAYERS, LENGTH = 3, 14
CONFIG = model_config(num_hidden_layers=LAYERS, hidden_size=24, num_attention_heads=4, num_key_value_heads=2)


def small_params(**changes) -> lsjax.Params:
    return random_params(dataclasses.replace(CONFIG, **changes), 5)


def packed(spans, seed: int = 0, vocab_size: int = CONFIG.vocab_size) -> Batch:
    """Rows of documents of the given lengths, ``[[5, 9], [14]]``, of random tokens; a document's last has no label."""
    rng = np.random.default_rng(seed)
    length = sum(spans[0])
    tokens = rng.integers(0, vocab_size, (len(spans), length)).astype(np.int32)
    labels, documents, positions = (np.zeros_like(tokens) for _ in range(3))
    for row, lengths in enumerate(spans):
        assert sum(lengths) == length
        begin = 0
        for number, count in enumerate(lengths):
            span = slice(begin, begin + count)
            labels[row, span] = [*tokens[row, span][1:], IGNORED]
            documents[row, span], positions[row, span] = number + 1, np.arange(count)
            begin += count
    return Batch(tokens, labels, documents, positions)


class DroppingLlama(NumpyLlama):
    """In NumPy float64, every exit's logits, with layers that some rows pass by, each document alone."""

    def exits(self, batch: Batch, kept: np.ndarray | None = None) -> np.ndarray:
        """float64 ``[layers, rows, length, vocab]``; ``kept`` is bool ``[layers, rows]``."""
        rows, length = batch.tokens.shape
        found = np.zeros((self.config.num_hidden_layers, rows, length, self.config.vocab_size))
        for row in range(rows):
            for document in np.unique(batch.documents[row]):
                where = batch.documents[row] == document
                here = None if kept is None else kept[:, row]
                found[:, row, where] = self._document(batch.tokens[row, where], here)
        return found

    def _document(self, tokens: np.ndarray, kept: np.ndarray | None) -> np.ndarray:
        x, found = self.weights["embed_tokens/embedding"][tokens][None], []
        head = self.weights.get("lm_head/kernel")
        head = self.weights["embed_tokens/embedding"].T if head is None else head
        for layer in range(self.config.num_hidden_layers):
            if kept is None or kept[layer]:
                name = f"layers_{layer}"
                x = x + self.attention(name + "/self_attn", self.norm(name + "/input_layernorm", x))
                x = x + self.mlp(name + "/mlp", self.norm(name + "/post_attention_layernorm", x))
            found.append((self.norm("norm", x) @ head)[0])
        return np.stack(found)

    def losses(self, batch: Batch, kept: np.ndarray | None = None) -> np.ndarray:
        """float64 ``[layers]``: each exit's mean cross-entropy over the labels."""
        logits = self.exits(batch, kept)
        valid = batch.labels != IGNORED
        largest = logits.max(-1, keepdims=True)
        log_probs = logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))
        picked = np.take_along_axis(log_probs, np.where(valid, batch.labels, 0)[None, ..., None], axis=-1)[..., 0]
        return -(picked * valid).sum((1, 2)) / valid.sum()
