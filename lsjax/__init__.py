"""LayerSkip self-speculative decoding for JAX: a Llama drafts with its first layers and verifies with the rest."""

from lsjax.config import LlamaConfig
from lsjax.params import Params, forward, init
