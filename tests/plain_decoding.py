"""Texts of one model with any options, and what plain decoding writes: full forwards in float64, a token at a time."""

import functools
from typing import Any

import numpy as np
from oracle import TIE, case
from support import NumpyLlama, quickly_compiled

import lsjax

DATA = case(4, 0.15)
ROWS = slice(0, 8)
NEW = 24
EOS = (7, 31)
FORBIDDEN = sorted({int(token) for token in DATA.texts[1:8, 14:18].ravel()})
EOS_OF_THE_MODEL = sorted({int(token) for token in DATA.texts[:8, 16:19].ravel()})[:4]


def generate(params=DATA.params, rows: Any = ROWS, **options) -> lsjax.GenerateOutput:
    """Texts of some prompts, in one shape."""
    options = {"max_new_tokens": NEW, "eos_token_id": (), "exit_layer": 2, **options}
    return lsjax.generate(params, DATA.prompts[rows], prompt_lengths=DATA.lengths[rows], **options)


def generate_once(**options) -> lsjax.GenerateOutput:
    """The same by a program that is compiled quickly, for options that are tried once."""
    return quickly_compiled(lambda params: generate(params, **options))(DATA.params)


def prompt(row: int) -> list[int]:
    return DATA.prompts[row, : DATA.lengths[row]].tolist()


def new_tokens(out: lsjax.GenerateOutput, row: int) -> list[int]:
    return np.asarray(out.tokens)[row, DATA.lengths[row] : np.asarray(out.lengths)[row]].tolist()


@functools.cache
def oracle() -> NumpyLlama:
    return NumpyLlama(DATA.params)


def plain_text(row: int, process, eos=(), new: int = NEW) -> list[int]:
    """Greedy decoding by full forwards in float64; ``process(text, logits)`` changes the logits."""
    text = prompt(row)
    for _ in range(new):
        logits = process(text, oracle().logits(np.array([text]))[0, -1])
        ordered = np.sort(logits)
        assert ordered[-1] - ordered[-2] > TIE * logits[np.isfinite(logits)].std()
        text.append(int(logits.argmax()))
        if text[-1] in eos:
            break
    return text[DATA.lengths[row] :]
