"""Random models with a steered agreement between layers, and an independent oracle in NumPy float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lsjax
from lsjax.params import abstract_tree, flatten, unflatten

LLAMA3_ROPE: Any = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_params(config: lsjax.LlamaConfig, seed: int, *, deep_from: int | None = None, deep_scale: float = 1.0):
    """Unit-scale weights, so that logits deviate by about 1 or more, with random norms and biases.

    What layers from ``deep_from`` on add to the residual is scaled by ``deep_scale``: the smaller, the more often an
    earlier layer predicts the last one's token.
    """
    rng = np.random.default_rng(seed)

    def draw(path: str, shape: tuple[int, ...]) -> np.ndarray:
        name = path.split("/")[-1]
        if name == "scale":
            return 1 + 0.2 * rng.normal(size=shape)
        if name == "bias":
            return 0.1 * rng.normal(size=shape)
        if name == "embedding":
            return rng.normal(size=shape)
        value = rng.normal(size=shape) / np.sqrt(shape[0])
        layer = int(path.split("/")[0].removeprefix("layers_")) if path.startswith("layers_") else -1
        if deep_from is not None and layer >= deep_from and ("o_proj" in path or "down_proj" in path):
            value *= deep_scale
        return value

    leaves = flatten(abstract_tree(config))
    drawn = {path: jnp.asarray(draw(path, leaf.shape), jnp.float32) for path, leaf in leaves.items()}
    return lsjax.Params(config, unflatten(drawn))


def frequencies(config: lsjax.LlamaConfig, positions: Any = 0, length: int = 1) -> np.ndarray:
    """Rotary frequencies at integer positions ``[...]`` of a text of this length, from the definitions in the papers.

    float64 ``[..., head_dim / 2]``; only dynamic NTK's depend on the position, only longrope's on the length.
    """
    index = np.arange(config.head_dim // 2)
    plain = config.rope_theta ** (-2 * index / config.head_dim)
    plain = np.broadcast_to(plain, (*np.shape(positions), len(index)))
    scaling: Any = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.rope_type == "linear":
        return plain / scaling.factor
    if scaling.rope_type == "dynamic":  # theta grows by s^(d / (d - 2)), s = factor * n / trained - (factor - 1)
        so_far = np.maximum(np.asarray(positions, np.float64) + 1, config.max_position_embeddings)[..., None]
        grown = scaling.factor * so_far / config.max_position_embeddings - (scaling.factor - 1)
        theta = config.rope_theta * grown ** (config.head_dim / (config.head_dim - 2))
        return theta ** (-2 * index / config.head_dim)
    if scaling.rope_type == "longrope":
        long = length > scaling.original_max_position_embeddings
        return plain / np.array(scaling.long_factor if long else scaling.short_factor)
    if scaling.rope_type == "yarn":
        # The channel that turns n times in the original length solves original * theta^(-2 i / d) = 2 pi n.
        turns = np.array([scaling.beta_fast, scaling.beta_slow])
        ends = np.log(scaling.original_max_position_embeddings / (2 * np.pi * turns)) / np.log(config.rope_theta)
        first, last = ends * config.head_dim / 2
        if scaling.truncate:
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0), min(last, config.head_dim - 1)
        stretched = np.clip((index - first) / (last - first), 0, 1)
        return plain * (1 - stretched) + plain / scaling.factor * stretched
    turns = scaling.original_max_position_embeddings * plain / (2 * np.pi)  # in the original length
    blend = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    return blend * plain + (1 - blend) * plain / scaling.factor


def attention_factor(config: lsjax.LlamaConfig) -> float:
    """What queries and keys are both multiplied by: YaRN's 0.1 ln s + 1, LongRoPE's sqrt(1 + ln s / ln original)."""
    scaling: Any = config.rope_scaling
    if scaling is None or scaling.rope_type not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    log = np.log(scaling.factor)
    if scaling.rope_type == "longrope":
        return float(np.sqrt(1 + log / np.log(scaling.original_max_position_embeddings)))
    if scaling.mscale and scaling.mscale_all_dim:
        return float((1 + 0.1 * scaling.mscale * log) / (1 + 0.1 * scaling.mscale_all_dim * log))
    return float(0.1 * log + 1)


class NumpyLlama:
    """A Llama in NumPy float64: no cache, no blocks, no exits; keys repeated for their query heads.

    ``length`` is what texts may come to, for longrope; None: what is given.
    """

    def __init__(self, params: lsjax.Params, length: int | None = None) -> None:
        self.config, self.length = params.config, length
        self.weights = {path: np.asarray(leaf, np.float64) for path, leaf in flatten(params.tree).items()}

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[name + "/kernel"] + self.weights.get(name + "/bias", 0)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        return self.weights[name + "/scale"] * x / np.sqrt(mean_square + self.config.rms_norm_eps)

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """``[batch, length, heads, head_dim]`` as complex numbers of the two halves."""
        half, positions = self.config.head_dim // 2, np.arange(x.shape[1])
        angles = positions[:, None] * frequencies(self.config, positions, self.length or x.shape[1])
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :] * attention_factor(self.config)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def attention(self, name: str, x: np.ndarray) -> np.ndarray:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.config.head_dim)
        query = self.rotate(self.linear(name + "/q_proj", x).reshape(heads))
        key = self.rotate(self.linear(name + "/k_proj", x).reshape(heads))
        value = self.linear(name + "/v_proj", x).reshape(heads)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        key, value = np.repeat(key, group, axis=2), np.repeat(value, group, axis=2)
        scores = np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(self.config.head_dim)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return self.linear(name + "/o_proj", np.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, -1))

    def mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gate = self.linear(name + "/gate_proj", x)
        return self.linear(name + "/down_proj", gate / (1 + np.exp(-gate)) * self.linear(name + "/up_proj", x))

    def logits(self, tokens: np.ndarray, num_layers: int | None = None) -> np.ndarray:
        """int ``[batch, length]`` to float64 ``[batch, length, vocab]``."""
        x = self.weights["embed_tokens/embedding"][tokens]
        for layer in range(self.config.num_hidden_layers if num_layers is None else num_layers):
            name = f"layers_{layer}"
            x = x + self.attention(name + "/self_attn", self.norm(name + "/input_layernorm", x))
            x = x + self.mlp(name + "/mlp", self.norm(name + "/post_attention_layernorm", x))
        x = self.norm("norm", x)
        head = self.weights.get("lm_head/kernel")
        return x @ (self.weights["embed_tokens/embedding"].T if head is None else head)

    def generate(self, tokens: np.ndarray, lengths: np.ndarray, count: int, num_layers: int | None = None):
        """Greedy text by full forwards: int ``[batch, width + count]`` and each choice's margin ``[batch, count]``.

        The margin is the gap between the two largest logits over the logits' standard deviation.
        """
        batch = len(tokens)
        text = np.concatenate([tokens, np.zeros((batch, count), tokens.dtype)], axis=1)
        margins = np.zeros((batch, count))
        rows = np.arange(batch)
        for step in range(count):
            seen = int(lengths.max()) + step
            logits = self.logits(text[:, :seen], num_layers)[rows, lengths + step - 1]
            top = np.sort(logits, axis=-1)
            margins[:, step] = (top[:, -1] - top[:, -2]) / logits.std(-1)
            text[rows, lengths + step] = logits.argmax(-1)
        return text, margins


def transformers_config(config: lsjax.LlamaConfig):
    """The same configuration for transformers."""
    import transformers

    fields: Any = {**config.to_dict(), "attn_implementation": "eager"}
    return transformers.LlamaConfig(**fields)


def transformers_model(params: lsjax.Params, **changes):
    """The same model in torch, weights renamed here by hand; ``changes`` alter its configuration."""
    import torch
    import transformers

    config = transformers_config(params.config)
    for name, value in changes.items():
        setattr(config, name, value)
    model = transformers.LlamaForCausalLM(config).eval()
    state = {}
    for path, leaf in flatten(params.tree).items():
        *modules, kind = path.replace("layers_", "layers/").split("/")
        name = ".".join(modules) + (".bias" if kind == "bias" else ".weight")
        value = np.array(leaf).T if kind == "kernel" else np.array(leaf)
        state[name if name.startswith("lm_head") else "model." + name] = torch.tensor(np.ascontiguousarray(value))
    if params.config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


def quickly_compiled(function: Any) -> Any:
    """``function`` under jit, compiled in a third of the time to slower code: for programs that run once or twice."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def compiled_programs(function: Any) -> int:
    """How many programs a jitted function has compiled so far."""
    return function._cache_size()


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """A list that grows by one for each program that the backend compiles, whoever asks for it."""
    found: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(str(kwargs.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def temporaries_of(compiled: Any) -> int:
    """Bytes of temporary memory that a compiled program wants."""
    return compiled.memory_analysis().temp_size_in_bytes
