"""What greedy decoding must return, from texts that plain full forwards wrote, and the rule for ties of rounding."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from support import NumpyLlama, random_params

import lsjax

CONFIG = lsjax.LlamaConfig(
    vocab_size=251,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
WIDTH, NEW = 12, 40
TIE = 1e-4  # of the logits' standard deviation


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, ragged prompts and the texts that it writes.

    ``texts`` is int ``[rows, WIDTH + NEW]``, row i valid up to ``lengths[i] + NEW``; ``margins`` ``[rows, NEW]``.
    """

    params: lsjax.Params
    prompts: np.ndarray
    lengths: np.ndarray
    texts: np.ndarray
    margins: np.ndarray

    @functools.cached_property
    def prepared(self) -> lsjax.DecodeParams:
        return lsjax.prepare(self.params)

    def expected(self, row: int, limit: int, eos: tuple[int, ...], pad: int) -> tuple[np.ndarray, int]:
        """The row that generate must return with this limit and these EOS ids, and its length."""
        start = self.lengths[row]
        new = self.texts[row, start : start + limit]
        ends = np.flatnonzero(np.isin(new, eos))
        length = start + (ends[0] + 1 if len(ends) else limit)
        padded = np.full(WIDTH + limit, pad)
        padded[:length] = self.texts[row, :length]
        return padded, int(length)


@functools.cache
def case(seed: int, deep_scale: float, num_layers: int = 4) -> Case:
    """Sixteen prompts of 1 to 12 tokens whose next 32 tokens hold at least 10 different ones."""
    params = random_params(CONFIG, seed, deep_from=1, deep_scale=deep_scale)
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, CONFIG.vocab_size, (48, WIDTH))
    lengths = rng.permutation(np.arange(48) % WIDTH + 1)
    texts, margins = NumpyLlama(params).generate(prompts, lengths, NEW, num_layers)
    lively = [row for row in range(48) if len(set(texts[row, lengths[row] : lengths[row] + 32])) >= 10][:16]
    assert len(lively) == 16
    prompts = np.where(np.arange(WIDTH) < lengths[:, None], prompts, 0)
    return Case(params, prompts[lively], lengths[lively], texts[lively], margins[lively])


@dataclasses.dataclass
class Report:
    """Rows compared, and how they came out."""

    cases: int = 0
    ties: int = 0
    wrong: list = dataclasses.field(default_factory=list)

    def compare(self, case: Case, rows, tokens, lengths, limit: int, eos: tuple[int, ...] = (), pad: int = 0) -> None:
        """Adds a batch: exactly the expected rows, or a first difference where the model itself hesitates."""
        tokens, lengths = np.asarray(tokens), np.asarray(lengths)
        for index, row in enumerate(rows):
            expected, length = case.expected(row, limit, eos, pad)
            self.cases += 1
            if lengths[index] == length and (tokens[index] == expected).all():
                continue
            first = int(np.argmax(tokens[index] != expected))
            step = first - case.lengths[row]
            if 0 <= step < NEW and case.margins[row, step] < TIE:
                self.ties += 1
            else:
                self.wrong.append((row, first, tokens[index].tolist(), expected.tolist()))
