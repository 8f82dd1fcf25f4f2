"""Whether a model computes the same here as in transformers: its modules, its logits at any depth, its greedy text."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from lsjax.checks import check_depth, check_int, check_params, check_tokens, is_traced
from lsjax.config import token_ids
from lsjax.convert.formats import open_checkpoint
from lsjax.decode.generate import generate
from lsjax.io import load
from lsjax.measure.difference import TIE, parting
from lsjax.measure.modules import compare_modules
from lsjax.measure.reference import Reference, as_reference, load_reference
from lsjax.measure.report import ParityReport, ParityRow, compare, worse
from lsjax.params import Params, forward
from lsjax.sources import locate
from lsjax.text.prompts import PROMPTS, encode, pad_rows

# Of float32's rounding: about 2e-6 in small random models, up to 3e-5 in a trained one with huge activations.
MODULE_TOLERANCE = 1e-4
LOGITS_TOLERANCE = 1e-4
_RANDOM_LENGTHS = (24, 5, 17, 12)  # of the prompts of random ids


def parity(
    source: str | os.PathLike[str] | Params,
    reference: Any = None,
    *,
    prompts: Sequence[str] | None = None,
    tokens: Any = None,
    depths: Sequence[int] | None = None,
    exit_layer: int | None = None,
    num_speculations: int = 4,
    max_new_tokens: int = 32,
    eos_token_id: int | Iterable[int] | None = None,
    module_tolerance: float = MODULE_TOLERANCE,
    logits_tolerance: float = LOGITS_TOLERANCE,
    revision: str | None = None,
) -> ParityReport:
    """Compares a model with transformers' in torch, both in float32 on the CPU.

    Three things are compared. *Modules*: each of ours on what torch's own was given, in every layer. *Logits*: those
    of ``lsjax.forward`` at some depths with those of the torch model cut off there. *Tokens*: transformers' greedy
    continuation of each prompt with that of ``lsjax.generate``, autoregressive and self-speculative; texts may part
    only where the torch model, reading the text so far, has both tokens within 1e-4 of its logits' standard deviation
    below its best one: a tie that rounding decides, counted in the report. (With ``dynamic`` rotary scaling, texts past
    ``max_position_embeddings`` differ by design: see README.)

    Args:
        source: what ``lsjax.load`` takes, as long as transformers reads it too (so not Flax's layout, which lsjax
            writes), or parameters in float32, with ``reference``.
        reference: a ``LlamaForCausalLM`` in float32 on the CPU to compare with. None: the source, as transformers
            reads it.
        prompts: texts to compare on, encoded by the source's tokenizer.
        tokens: ids instead: ``[length]``, ``[batch, length]``, or rows of unequal length. None of both: built-in
            prompts where the source has a tokenizer, else random ids from a fixed seed.
        depths: numbers of layers to compare logits at; ``()``: none. None: one layer, half of them, all, and
            ``exit_layer``.
        exit_layer: layers that draft for the self-speculative text. None: a quarter of them.
        num_speculations: drafts a round.
        max_new_tokens: tokens to compare of each prompt's continuation; 0: none.
        eos_token_id: as of ``lsjax.generate``.
        module_tolerance: of the relative error of modules: the difference over the sum of the number's own magnitude
            and the standard deviation of what torch's module returned.
        logits_tolerance: of logits, likewise.
        revision: a branch, tag or commit of a hub id.

    Returns:
        a report: ``print(report)`` shows the table, ``report.assert_close()`` is for tests.

    Raises:
        ImportError: torch is not installed (the extra ``torch``).
        TypeError, ValueError: says what was expected and what came.
        as ``lsjax.load``: the source does not load.

    Example:
        >>> lsjax.measure.parity("./checkpoint", depths=(4, 16), exit_layer=4).assert_close()
        >>> lsjax.measure.parity(params, torch_model, tokens=ids).assert_close()
    """
    if prompts is not None and tokens is not None:
        raise ValueError("give prompts or tokens, not both")
    if isinstance(prompts, str):
        raise TypeError("prompts: expected several texts, got one str")
    if prompts is not None and not len(prompts):
        raise ValueError("prompts: expected at least one text, got none")
    max_new_tokens = check_int("max_new_tokens", max_new_tokens, 0)
    with _on_the_cpu():
        params, torch_model = _open(source, reference, revision)
        layers = params.config.num_hidden_layers
        exit_layer = max(layers // 4, 1) if exit_layer is None else check_depth("exit_layer", exit_layer, params.config)
        if depths is None:
            depths = sorted({1, max(layers // 2, 1), layers, exit_layer})
        depths = [check_depth("depths", depth, params.config) for depth in depths]
        rows, inputs = _read_inputs(source, params, prompts, tokens, revision)
        padded, lengths = pad_rows(rows)
        valid = np.arange(padded.shape[1]) < lengths[:, None]
        found = compare_modules(params, torch_model, padded, valid, module_tolerance)
        found += compare_logits(params, torch_model, padded, valid, depths, logits_tolerance)
        ties, texts = 0, 0
        if max_new_tokens:
            eos = params.config.eos_token_id if eos_token_id is None else token_ids("eos_token_id", eos_token_id)
            expected = [torch_model.generate(row.tolist(), max_new_tokens, eos) for row in rows]
            options = {"max_new_tokens": max_new_tokens, "eos_token_id": eos, "num_speculations": num_speculations}
            for depth in (None, exit_layer):
                row, tied = compare_tokens(params, torch_model, rows, expected, exit_layer=depth, **options)
                found.append(row)
                ties, texts = ties + tied, texts + len(rows)
    return ParityReport(tuple(found), inputs, texts, ties)


def compare_logits(
    params: Params,
    reference: Reference,
    tokens: np.ndarray,
    valid: np.ndarray,
    depths: Sequence[int],
    tolerance: float,
) -> list[ParityRow]:
    """One row for each depth: teacher-forced logits of ``[batch, length]`` ids at the valid positions."""
    found = forward(params, tokens, exits=tuple(depths)) if depths else ()
    rows = []
    for depth, logits in zip(depths, found, strict=True):
        what = f"logits, {depth} of {params.config.num_hidden_layers} layers"
        rows.append(compare(what, logits, reference.logits(tokens, depth), tolerance, valid=valid))
    return rows


def compare_tokens(
    params: Params,
    reference: Reference,
    prompts: Sequence[np.ndarray],
    expected: Sequence[Sequence[int]],
    *,
    exit_layer: int | None,
    **options: Any,
) -> tuple[ParityRow, int]:
    """``lsjax.generate`` on one batch of prompts against the reference's texts.

    Args:
        params: the model.
        reference: who judges where texts part.
        prompts: ids, rows of unequal length.
        expected: each prompt's greedy text, prompt and EOS included, of :meth:`Reference.generate`.
        exit_layer: layers that draft; None: autoregressive.
        options: further ones of ``lsjax.generate``.

    Returns:
        the row of the worst text, and how many texts part at a tie.
    """
    what = "tokens, autoregressive" if exit_layer is None else f"tokens, exit layer {exit_layer}"
    worst, ties = ParityRow(what, 0.0, 0.0, TIE, "all equal"), 0
    for index, (prompt, written, text) in enumerate(
        zip(prompts, _write(params, prompts, exit_layer, options), expected, strict=True)
    ):
        at = parting(written, text)
        if at is not None:
            row = _judge(what, reference, written, text, at, f"text {index}, new token {at - len(prompt) + 1}")
            ties += row.ok
            worst = worse(worst, row)
    return worst, ties


def _write(
    params: Params, prompts: Sequence[np.ndarray], exit_layer: int | None, options: dict[str, Any]
) -> Iterator[list[int]]:
    """Each prompt's text, prompt included: of one batch, or alone where longrope's length may lie between rows."""
    alone = params.config.short_length is not None
    for rows in [[prompt] for prompt in prompts] if alone else [prompts]:
        tokens, lengths = pad_rows(rows)
        out = generate(params, tokens, prompt_lengths=lengths, exit_layer=exit_layer, **options)
        for row, length in zip(np.asarray(out.tokens), np.asarray(out.lengths), strict=True):
            yield row[:length].tolist()


def _judge(
    what: str, reference: Reference, written: Sequence[int], text: Sequence[int], at: int, where: str
) -> ParityRow:
    """Two texts that part at an index: how far the reference's logits of the two tokens lie below its best."""
    if at == min(len(written), len(text)):  # one ends where the other goes on
        return ParityRow(what, np.inf, 1.0, TIE, f"{where}: one text ends")
    logits = reference.logits(np.array([text[:at]]))[0, -1]
    gap = float(logits.max() - min(logits[written[at]], logits[text[at]]))
    where = f"{where}: id {written[at]}, expected {text[at]}"
    return ParityRow(what, gap, float(logits.std()), TIE, where)


def _open(source: Any, reference: Any, revision: str | None) -> tuple[Params, Reference]:
    """Our model and torch's, both float32 on the CPU."""
    if isinstance(source, str | os.PathLike):
        path = locate(source, revision=revision)
        if reference is None and open_checkpoint(path).format == "lsjax":
            raise ValueError(
                f"{path} was written by lsjax, which transformers does not read: convert it first "
                "(`lsjax convert --to hf`), or give a torch model as reference"
            )
        params = load(source, "float32", revision=revision)
        return params, load_reference(path) if reference is None else as_reference(reference, params.config)
    check_params(source)
    if reference is None:
        raise ValueError("reference: expected a LlamaForCausalLM to compare params with, got None")
    if is_traced(source) or any(leaf.dtype != np.float32 for leaf in jax.tree.leaves(source)):
        raise ValueError(f"params: expected concrete arrays in float32, got {source.dtype} ones or a traced model")
    if jax.default_backend() != "cpu":
        source = jax.device_put(source, jax.local_devices(backend="cpu")[0])
    return source, as_reference(reference, source.config)


def _read_inputs(
    source: Any, params: Params, prompts: Sequence[str] | None, tokens: Any, revision: str | None
) -> tuple[list[np.ndarray], str]:
    """The rows of ids to compare on, and what they are in words."""
    if tokens is not None:
        several = hasattr(tokens, "__len__") and len(tokens) and np.ndim(tokens[0])
        rows, what = list(tokens) if several else [tokens], "given ids"
    else:
        rows, what = _encode(source, prompts, revision)
        if not rows:
            rng = np.random.default_rng(0)
            rows = [rng.integers(0, params.config.vocab_size, length) for length in _RANDOM_LENGTHS]
            what = "random ids"
    rows = [check_tokens(row, params.config)[0][0] for row in rows]
    return rows, f"{what}: {len(rows)} row{'s'[: len(rows) > 1]}, {sum(map(len, rows))} tokens"


def _encode(source: Any, prompts: Sequence[str] | None, revision: str | None) -> tuple[list[np.ndarray], str]:
    """Prompts by the source's tokenizer; the built-in ones, or no rows without a tokenizer, where none are given."""
    if not isinstance(source, str | os.PathLike):
        if prompts is not None:
            raise ValueError("prompts: params come without a tokenizer: give tokens")
        return [], ""
    from lsjax.text.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(source, revision=revision)
    except (OSError, ValueError, ImportError):  # absent, or one that lsjax or transformers cannot read
        if prompts is not None:
            raise
        return [], ""
    what = "built-in prompts" if prompts is None else "given prompts"
    return [encode(prompt, tokenizer) for prompt in (PROMPTS if prompts is None else prompts)], what


def _on_the_cpu() -> contextlib.AbstractContextManager[Any]:
    """Torch runs there, and there float32 products are not rounded further."""
    if jax.default_backend() == "cpu":
        return contextlib.nullcontext()
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError as error:
        raise RuntimeError(f"parity runs on JAX's CPU backend, which JAX_PLATFORMS leaves out: {error}") from error
