"""LayerSkip self-speculative decoding for JAX: a Llama drafts with its first layers and verifies with the rest."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsjax import measure, training
    from lsjax.config import LlamaConfig, RopeScaling
    from lsjax.convert.checkpoint import CheckpointError
    from lsjax.decode import processors
    from lsjax.decode.generate import GenerateOutput, generate
    from lsjax.decode.prefill import prefill
    from lsjax.decode.rewind import rewind
    from lsjax.decode.round import Draft, Verification, decode_round, draft, verify
    from lsjax.decode.score import ScoreOutput, score
    from lsjax.decode.state import DecodeState, Plan, Stats
    from lsjax.decode.stream import Stream, StreamBlock, stream
    from lsjax.decode.token_scores import TokenScores
    from lsjax.io import load, save
    from lsjax.params import Params, forward, init, tensor_parallel
    from lsjax.prepared import DecodeParams, prepare
    from lsjax.text.generator import TextGenerator

__version__ = "0.1.0"

# Where each public name lives. A module is imported when a name of it is first used (PEP 562), so that `import lsjax`
# takes no time, and the command line only what a command needs.
_HOMES = {
    "CheckpointError": "lsjax.convert.checkpoint",
    "DecodeParams": "lsjax.prepared",
    "DecodeState": "lsjax.decode.state",
    "Draft": "lsjax.decode.round",
    "GenerateOutput": "lsjax.decode.generate",
    "LlamaConfig": "lsjax.config",
    "Params": "lsjax.params",
    "Plan": "lsjax.decode.state",
    "RopeScaling": "lsjax.config",
    "ScoreOutput": "lsjax.decode.score",
    "Stats": "lsjax.decode.state",
    "Stream": "lsjax.decode.stream",
    "StreamBlock": "lsjax.decode.stream",
    "TextGenerator": "lsjax.text.generator",
    "TokenScores": "lsjax.decode.token_scores",
    "Verification": "lsjax.decode.round",
    "decode_round": "lsjax.decode.round",
    "draft": "lsjax.decode.round",
    "forward": "lsjax.params",
    "generate": "lsjax.decode.generate",
    "init": "lsjax.params",
    "load": "lsjax.io",
    "prefill": "lsjax.decode.prefill",
    "prepare": "lsjax.prepared",
    "rewind": "lsjax.decode.rewind",
    "save": "lsjax.io",
    "score": "lsjax.decode.score",
    "stream": "lsjax.decode.stream",
    "tensor_parallel": "lsjax.params",
    "verify": "lsjax.decode.round",
}
_ROOMS = (
    "checks",
    "config",
    "convert",
    "decode",
    "io",
    "measure",
    "model",
    "params",
    "prepared",
    "sources",
    "text",
    "training",
)
_MODULES = {room: f"lsjax.{room}" for room in _ROOMS} | {"processors": "lsjax.decode.processors"}

__all__ = [
    "CheckpointError",
    "DecodeParams",
    "DecodeState",
    "Draft",
    "GenerateOutput",
    "LlamaConfig",
    "Params",
    "Plan",
    "RopeScaling",
    "ScoreOutput",
    "Stats",
    "Stream",
    "StreamBlock",
    "TextGenerator",
    "TokenScores",
    "Verification",
    "decode_round",
    "draft",
    "forward",
    "generate",
    "init",
    "load",
    "measure",
    "prefill",
    "prepare",
    "processors",
    "rewind",
    "save",
    "score",
    "stream",
    "tensor_parallel",
    "training",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        found = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        found = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'lsjax' has no attribute {name!r}")
    globals()[name] = found  # from now on without this function
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
