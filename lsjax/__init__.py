"""LayerSkip self-speculative decoding for JAX: a Llama drafts with its first layers and verifies with the rest."""

from lsjax.config import LlamaConfig
from lsjax.decode.generate import GenerateOutput, generate, prefill
from lsjax.decode.round import Draft, Verification, decode_round, draft, verify
from lsjax.decode.state import DecodeState, Plan, Stats
from lsjax.params import Params, forward, init
