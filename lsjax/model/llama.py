"""The Llama as Flax Linen modules, used purely: ``Llama(config).apply({"params": tree}, ...)``.

Parameters have Flax's names and layouts (``kernel`` is ``[in, out]``), the modules those of transformers. Layers are
unrolled, one set of arrays each, so that a program over layers ``[lo, hi)`` reads their weights and no others.

``fused`` modules read the same numbers from fewer arrays: products that read the same input are one product. Axes of
heads and columns stay axes of the weights, so that they can still be split between devices. ``transposed`` ones hold
every weight of a layer, and the untied head, as ``[out, in]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from lsjax.config import LlamaConfig
from lsjax.model.attention import attend
from lsjax.model.cache import LayerCache, write
from lsjax.model.projection import Projection, dot, lookup, take_outputs
from lsjax.model.rope import rotate, rotation


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    config: LlamaConfig
    param_dtype: jnp.dtype = jnp.float32
    fused: bool = False
    transposed: bool = False

    def setup(self) -> None:
        config = self.config
        group = config.num_attention_heads // config.num_key_value_heads
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        if self.fused:
            # For each key head its query heads, the key and the value.
            shape = (config.num_key_value_heads, group + 2, config.head_dim)
            self.qkv_proj = _linear(self, shape, config.attention_bias)
        else:
            self.q_proj = _linear(self, (width,), config.attention_bias)
            self.k_proj = _linear(self, (kv_width,), config.attention_bias)
            self.v_proj = _linear(self, (kv_width,), config.attention_bias)
        self.o_proj = _linear(self, (config.hidden_size,), config.attention_bias)

    def __call__(
        self,
        hidden: jax.Array,
        positions: jax.Array,
        angles: tuple[jax.Array, jax.Array],
        cache: LayerCache | None = None,
        where: jax.Array | int = 0,
        used: jax.Array | int | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """``[batch, length, hidden]`` to the same, and the cache with the new keys and values written at ``where``."""
        length = hidden.shape[1]
        query, key, value = self._project(hidden, angles)
        key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        if cache is None:
            given, used = LayerCache(key, value, key.dtype), length
        else:
            given = cache = write(cache, key, value, where)
        mixed = attend(query, given, positions, length if used is None else used)
        return self.o_proj(mixed), cache

    def _project(
        self, hidden: jax.Array, angles: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries and keys, rotated, and values: ``[batch, length, heads or kv_heads, head_dim]``."""
        batch, length, _ = hidden.shape
        head_dim = self.config.head_dim
        if not self.fused:
            query = self.q_proj(hidden).reshape(batch, length, -1, head_dim)
            key = self.k_proj(hidden).reshape(batch, length, -1, head_dim)
            value = self.v_proj(hidden).reshape(batch, length, -1, head_dim)
            return rotate(query, *angles), rotate(key, *angles), value
        joined = self.qkv_proj(hidden)
        kv_heads, parts = joined.shape[2:4]
        turned = rotate(joined[..., : parts - 1, :].reshape(batch, length, -1, head_dim), *angles)
        turned = turned.reshape(batch, length, kv_heads, parts - 1, head_dim)
        query = turned[..., : parts - 2, :].reshape(batch, length, -1, head_dim)
        return query, turned[..., parts - 2, :], joined[..., parts - 1, :]


class Mlp(nn.Module):
    """The gated feed-forward network (SwiGLU, arXiv 2002.05202)."""

    config: LlamaConfig
    param_dtype: jnp.dtype = jnp.float32
    fused: bool = False
    transposed: bool = False

    def setup(self) -> None:
        config = self.config
        if self.fused:
            shape = (2, config.intermediate_size)
            self.gate_up_proj = _linear(self, shape, config.mlp_bias)
        else:
            self.gate_proj = _linear(self, (config.intermediate_size,), config.mlp_bias)
            self.up_proj = _linear(self, (config.intermediate_size,), config.mlp_bias)
        self.down_proj = _linear(self, (config.hidden_size,), config.mlp_bias)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """``[..., hidden]`` to the same."""
        if self.fused:
            joined = self.gate_up_proj(hidden)
            gate, up = joined[..., 0, :], joined[..., 1, :]
        else:
            gate, up = self.gate_proj(hidden), self.up_proj(hidden)
        return self.down_proj(nn.silu(gate) * up)


class Block(nn.Module):
    """One layer: attention and MLP, each behind its norm and around its residual."""

    config: LlamaConfig
    param_dtype: jnp.dtype = jnp.float32
    fused: bool = False
    transposed: bool = False

    def setup(self) -> None:
        self.input_layernorm = _norm(self.config, self.param_dtype)
        self.self_attn = Attention(self.config, self.param_dtype, self.fused, self.transposed)
        self.post_attention_layernorm = _norm(self.config, self.param_dtype)
        self.mlp = Mlp(self.config, self.param_dtype, self.fused, self.transposed)

    def __call__(self, hidden: jax.Array, *args, **kwargs) -> tuple[jax.Array, LayerCache | None]:
        """``[batch, length, hidden]`` to the same, and the layer's cache; further arguments as of ``Attention``."""
        dtype = hidden.dtype  # of the embedding; norms kept in float32 beside bfloat16 weights do not widen the stream
        attended, cache = self.self_attn(self.input_layernorm(hidden), *args, **kwargs)
        hidden = hidden + attended.astype(dtype)
        return hidden + self.mlp(self.post_attention_layernorm(hidden)).astype(dtype), cache


class Head(nn.Module):
    """The untied output projection, without bias; its products are accumulated and returned in float32."""

    config: LlamaConfig
    param_dtype: jnp.dtype = jnp.float32
    transposed: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, first: jax.Array | int = 0, count: int | None = None) -> jax.Array:
        """``[..., hidden]`` to float32 ``[..., vocab]``, or to ``count`` ids' logits from ``first`` on."""
        shape = (self.config.hidden_size, self.config.vocab_size)
        initializer = nn.initializers.normal(self.config.initializer_range)
        if self.transposed:
            weight = self.param("weight", initializer, shape[::-1], self.param_dtype)
        else:
            weight = self.param("kernel", initializer, shape, self.param_dtype)
        x, weight = promote_dtype(x, take_outputs(weight, first, count, transposed=self.transposed))
        return dot(x, weight, transposed=self.transposed, dtype=jnp.float32)


class DraftHead(nn.Module):
    """The output projection to some ids only, for drafts: those of a vocabulary that is read in a fraction of the time.

    Its parameters are ``weight`` ``[count, hidden]`` and ``columns``, int32 ``[vocab]``: where in these each id is, and
    ``count`` for an id that is not among them.

    Attributes:
        config: the model's configuration.
        count: ids.
    """

    config: LlamaConfig
    count: int
    param_dtype: jnp.dtype = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., hidden]`` to float32 ``[..., vocab]``, -inf for the other ids."""
        initializer = nn.initializers.normal(self.config.initializer_range)
        weight = self.param("weight", initializer, (self.count, self.config.hidden_size), self.param_dtype)
        columns = self.param("columns", nn.initializers.zeros, (self.config.vocab_size,), jnp.int32)
        x, weight = promote_dtype(x, weight)
        some = dot(x, weight, transposed=True, dtype=jnp.float32)
        some = jnp.concatenate([some, jnp.full((*some.shape[:-1], 1), -jnp.inf)], axis=-1)
        return jnp.take(some, columns, axis=-1, mode="clip")


class Llama(nn.Module):
    """A Llama whose depth is a static argument of every call.

    Attributes:
        config: the model's configuration.
        param_dtype: the dtype of parameters that ``init`` makes; applying follows the parameters' own dtype.
        fused: reads the parameters that ``lsjax.prepare`` makes.
        transposed: these as it makes them for CPUs.
        draft_vocab_size: ids of a draft head of its own; 0: there is none.
    """

    config: LlamaConfig
    param_dtype: jnp.dtype = jnp.float32
    fused: bool = False
    transposed: bool = False
    draft_vocab_size: int = 0

    def setup(self) -> None:
        config = self.config
        initializer = nn.initializers.normal(config.initializer_range)
        self.embed_tokens = nn.Embed(
            config.vocab_size, config.hidden_size, param_dtype=self.param_dtype, embedding_init=initializer
        )
        self.layers = [
            Block(config, self.param_dtype, self.fused, self.transposed) for _ in range(config.num_hidden_layers)
        ]
        self.norm = _norm(config, self.param_dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Head(config, self.param_dtype, self.transposed)
        if self.draft_vocab_size:
            self.draft_head = DraftHead(config, self.draft_vocab_size, self.param_dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Ids ``[...]`` to ``[..., hidden]``; ids outside the vocabulary read its nearest end."""
        return lookup(self.embed_tokens.embedding, tokens)

    def run_layers(
        self,
        hidden: jax.Array,
        cache: Sequence[LayerCache] | None = None,
        start: jax.Array | int = 0,
        *,
        lo: int = 0,
        hi: int | None = None,
        write_at: jax.Array | None = None,
        capacity: int | None = None,
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Runs layers ``[lo, hi)``: a draft runs the first ones, its verification resumes at the exit.

        Args:
            hidden: ``[batch, length, hidden]``, what layer ``lo`` reads.
            cache: one cache for each of these layers, holding every earlier position; None: there are none earlier.
            start: the first position, a scalar for all rows or int32 ``[batch]``.
            lo: the first layer, static.
            hi: one past the last layer, static; None: all.
            write_at: int32 ``[batch, length]``, slots to write to where they are not ``start, start + 1, …``.
            capacity: static; tokens that the text may come to, by which longrope takes its short or long factors.
                None: this length, or the cache's slots.

        Returns:
            the last of these layers' output ``[batch, length, hidden]`` and their caches, the new positions written
            (an empty tuple without a cache).
        """
        length = hidden.shape[1]
        positions = jnp.atleast_1d(start)[:, None] + jnp.arange(length)
        if capacity is None:
            capacity = cache[0].slots if cache else length
        angles = rotation(self.config, positions, capacity)
        used = jnp.minimum(jnp.max(positions) + 1, cache[0].slots) if cache else None
        where = start if write_at is None else write_at
        layers = self.layers[lo:hi]
        written = []
        for layer, layer_cache in zip(layers, cache or [None] * len(layers), strict=True):
            hidden, layer_cache = layer(hidden, positions, angles, layer_cache, where, used)
            written.append(layer_cache)
        return hidden, () if cache is None else tuple(written)

    def logits(self, hidden: jax.Array, first: jax.Array | int = 0, count: int | None = None) -> jax.Array:
        """The final norm and the head: ``[..., hidden]`` of any layer to float32 ``[..., vocab]``.

        Args:
            hidden: what the layer returned.
            first: the first id whose logit is wanted, where ``count`` is given.
            count: static; how many ids; None: the whole vocabulary.
        """
        return self.head(self.norm(hidden), first, count)

    def head(self, hidden: jax.Array, first: jax.Array | int = 0, count: int | None = None) -> jax.Array:
        """The output projection alone, as of :meth:`logits`: ``[..., hidden]`` to float32 ``[..., vocab]``."""
        if self.config.tie_word_embeddings:
            embedding = take_outputs(self.embed_tokens.embedding, first, count, transposed=True)
            hidden, embedding = promote_dtype(hidden, embedding)
            return dot(hidden, embedding, transposed=True, dtype=jnp.float32)
        return self.lm_head(hidden, first, count)

    def draft_logits(self, hidden: jax.Array) -> jax.Array:
        """As :meth:`logits` by the draft head, -inf for ids that it has not; by the head where there is none."""
        return self.draft_head(self.norm(hidden)) if self.draft_vocab_size else self.logits(hidden)

    def __call__(self, tokens: jax.Array, *, exits: Sequence[int] | None = None) -> tuple[jax.Array, ...]:
        """Teacher-forced logits after each of ``exits`` layers (None: after all), one pass for all of them.

        Args:
            tokens: int32 ``[batch, length]``.
            exits: static depths, each in 1..num_layers.

        Returns:
            for each exit float32 ``[batch, length, vocab]``.
        """
        exits = (self.config.num_hidden_layers,) if exits is None else tuple(exits)
        hidden, lo, found = self.embed(tokens), 0, {}
        for depth in sorted(set(exits)):
            hidden, _ = self.run_layers(hidden, lo=lo, hi=depth)
            found[depth], lo = self.logits(hidden), depth
        return tuple(found[depth] for depth in exits)


def _linear(module: Attention | Mlp, features: tuple[int, ...], use_bias: bool) -> Projection:
    initializer = nn.initializers.normal(module.config.initializer_range)
    return Projection(features, initializer, use_bias, module.transposed, module.param_dtype)


def _norm(config: LlamaConfig, param_dtype) -> nn.RMSNorm:
    """RMSNorm (arXiv 1910.07467), computed in float32."""
    return nn.RMSNorm(epsilon=config.rms_norm_eps, param_dtype=param_dtype)
