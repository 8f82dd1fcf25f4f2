"""LayerSkip self-speculative decoding for JAX: a Llama drafts with its first layers and verifies with the rest."""

from lsjax import measure
from lsjax.config import LlamaConfig, RopeScaling
from lsjax.convert.checkpoint import CheckpointError
from lsjax.decode.generate import GenerateOutput, generate
from lsjax.decode.prefill import prefill
from lsjax.decode.round import Draft, Verification, decode_round, draft, verify
from lsjax.decode.state import DecodeState, Plan, Stats
from lsjax.io import load, save
from lsjax.params import Params, forward, init, tensor_parallel
from lsjax.prepared import DecodeParams, prepare

__version__ = "0.1.0"

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
    "Stats",
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
    "save",
    "tensor_parallel",
    "verify",
]
