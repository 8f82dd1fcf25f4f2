"""What a checkpoint is, and what is wrong or odd about it, from its headers alone: no weight is read."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lsjax.convert import flax, huggingface, pytorch
from lsjax.convert.checkpoint import DTYPES, Checkpoint, CheckpointError, Listing, Stored, one_line
from lsjax.convert.formats import open_checkpoint
from lsjax.convert.names import HUGGINGFACE
from lsjax.convert.plan import Plan, make_plan


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What the headers of a checkpoint say.

    Attributes:
        where: the directory or file.
        format: "safetensors", "pytorch", "gguf", "lsjax", or None where no weights were found.
        family: the architecture that the checkpoint names, such as "llama"; None where it names none.
        config: ``LlamaConfig``'s entries, or where lsjax does not compute the model, those of its own that matter.
        num_parameters: numbers in the tensors of the model (not in copies, buffers or unexpected tensors).
        num_bytes: what all the tensors take in the files.
        dtypes: how many tensors each dtype stores, by its name in the format.
        tensors: every tensor.
        files: every file's name and bytes.
        problems: why it cannot be loaded, one line each; empty where it loads, as far as headers tell.
        notes: what is odd, but no hindrance.
    """

    where: Path
    format: str | None
    family: str | None
    config: dict[str, Any]
    num_parameters: int
    num_bytes: int
    dtypes: dict[str, int]
    tensors: tuple[Stored, ...]
    files: dict[str, int]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def loads(self) -> bool:
        """Whether nothing in the headers keeps it from being loaded."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        tensors = [
            {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "dtype": stored_dtype(tensor),
                "bytes": tensor.stored_bytes,
                "file": tensor.where,
            }
            for tensor in self.tensors
        ]
        return fields | {"where": str(self.where), "loads": self.loads, "tensors": tensors}


def inspect(path: Path) -> Inspection:
    """What a directory or ``.gguf`` file holds; whatever is wrong with it is told, not raised.

    Raises:
        ImportError: a package that the format needs is not installed.
        OSError: a file cannot be read.
    """
    try:
        checkpoint = open_checkpoint(path)
        found: str | None = checkpoint.format
    except CheckpointError as error:
        checkpoint, found = _without_weights(path, error), None
    plan = make_plan(checkpoint)
    tensors = checkpoint.listing.tensors
    family = checkpoint.entries.get("general.architecture" if path.is_file() else "model_type")
    taken = [step.tensor for step in plan.steps] or list(tensors)
    return Inspection(
        where=path,
        format=found,
        family=family if isinstance(family, str) else None,
        config=_config(checkpoint),
        num_parameters=sum(math.prod(tensor.shape) for tensor in taken),
        num_bytes=sum(tensor.stored_bytes for tensor in tensors),
        dtypes=dict(collections.Counter(map(stored_dtype, tensors)).most_common()),
        tensors=tensors,
        files={entry.name: entry.stat().st_size for entry in _files(path)},
        problems=tuple(map(one_line, plan.problems)),
        notes=tuple(map(one_line, _notes(checkpoint, plan))),
    )


def stored_dtype(tensor: Stored) -> str:
    """A tensor's dtype in its file, as the format calls it."""
    return tensor.stored_as or tensor.dtype


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(entry for entry in path.iterdir() if entry.is_file())


def _without_weights(path: Path, error: CheckpointError) -> Checkpoint:
    """What can be told where no weights can be listed."""
    if path.is_file():
        return Checkpoint(path, "gguf", HUGGINGFACE, Listing(()), None, error.problems)
    found = huggingface.with_config(path, "safetensors", HUGGINGFACE, Listing(()))
    return dataclasses.replace(found, config=None, problems=(*found.problems, *error.problems))


_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
_OTHERS = (
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def _config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The entries that say what the model computes; as the checkpoint gives them where lsjax cannot read them."""
    if checkpoint.config is not None:
        entries = checkpoint.config.to_dict()
    else:
        prefix = f"{checkpoint.entries.get('general.architecture')}."
        short = {name: value for name, value in checkpoint.entries.items() if name.startswith(prefix)}
        if short:
            return short
        entries = {**checkpoint.entries, **checkpoint.generation_entries}
    return {name: entries[name] for name in (*_SIZES, *_OTHERS) if name in entries}


def _notes(checkpoint: Checkpoint, plan: Plan) -> Iterator[str]:
    """What is odd about a checkpoint, though it hinders nothing."""
    where, config = checkpoint.where, checkpoint.config
    kinds = sorted({stored_dtype(step.tensor) for step in plan.steps})
    if len(kinds) > 1 and checkpoint.format != "gguf":
        yield f"mixed dtypes: {', '.join(kinds)}; without --dtype each tensor keeps its own"
    said = checkpoint.entries.get("dtype", checkpoint.entries.get("torch_dtype"))
    names = {str(DTYPES[step.tensor.dtype]) for step in plan.steps if step.tensor.dtype in DTYPES}
    if isinstance(said, str) and names and said not in names:
        yield f"config.json says {said}, but the tensors are {' and '.join(sorted(names))}"
    if plan.tied is not None:
        yield f"{plan.tied.name} is stored too, although the head is tied; loading compares it with the embedding"
    if plan.ignored:
        names = [tensor.name for tensor in plan.ignored]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"ignored, since they are recomputed: rotary buffers {names[0]}{more}"
    if config is not None and not config.eos_token_id:
        yield "no eos_token_id: generation ends at its limit only"
    if where.is_file():
        if "tokenizer.ggml.model" not in checkpoint.entries:
            yield "no tokenizer: prompts have to be given as token ids"
        return
    if not any((where / name).is_file() for name in huggingface.VOCABULARY_FILES):
        yield "no tokenizer: prompts have to be given as token ids"
    used = {tensor.where for tensor in checkpoint.listing.tensors}
    beside = [
        entry.name
        for entry in _files(where)
        if entry.suffix in (".safetensors", ".bin", ".gguf", ".pt", ".pth") and entry.name not in used
    ]
    weights = {"pytorch": pytorch.WEIGHTS, "lsjax": flax.WEIGHTS}.get(checkpoint.format, huggingface.WEIGHTS)
    if weights in beside and (where / f"{weights}.index.json").is_file():
        beside.remove(weights)
        yield f"{weights} is ignored: {weights}.index.json decides, and does not name it"
    if beside and used:
        yield f"other weights beside it, ignored: {', '.join(beside[:4])}{' and more' if len(beside) > 4 else ''}"
