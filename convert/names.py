"""The table of names: what every tensor is called in each format, and how to bring it into Flax's layout."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Literal, NamedTuple

import numpy as np

from lsjax.config import LlamaConfig

# "keep": stored as in Flax. "transpose": stored [out, in], in Flax [in, out]. "query rows" and "key rows": stored
# [out, in] with the rows of each head interleaved for rotation in pairs, as llama.cpp wants them (biases too).
Transform = Literal["keep", "transpose", "query rows", "key rows"]


class Row(NamedTuple):
    """One tensor of a format; ``{n}`` stands for a layer's number."""

    source: str
    flax: str
    transform: Transform


@dataclasses.dataclass(frozen=True)
class Table:
    """A format's names.

    Attributes:
        rows: every tensor that a Llama can have.
        ignored: names that some checkpoints carry and that hold nothing of the model.
    """

    rows: tuple[Row, ...]
    ignored: tuple[str, ...] = ()

    def to_flax(self, name: str) -> tuple[str, Transform] | None:
        """The Flax path of a tensor and the transform into Flax's layout; None for a name not in the table."""
        template, layer = _split(name)
        row = self._by_source.get(template)
        return None if row is None else (row.flax.replace("{n}", layer), row.transform)

    def from_flax(self, path: str) -> tuple[str, Transform]:
        """The name of the tensor that a Flax path is read from, and its transform.

        Raises:
            KeyError: no tensor of this format has that path.
        """
        template, layer = _split(path)
        row = self._by_flax[template]
        return row.source.replace("{n}", layer), row.transform

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of this name is passed over."""
        return _split(name)[0] in self.ignored

    @functools.cached_property
    def _by_source(self) -> dict[str, Row]:
        return {row.source: row for row in self.rows}

    @functools.cached_property
    def _by_flax(self) -> dict[str, Row]:
        return {row.flax: row for row in self.rows}


class Target(NamedTuple):
    """A format that can be written: its names, its file of weights, and what its headers call it."""

    table: Table
    weights: str
    format: str


def _split(name: str) -> tuple[str, str]:
    """``"model.layers.12.mlp"`` as ``("model.layers.{n}.mlp", "12")``; layer numbers have no leading zeros."""
    found = re.search(r"(?<=[._])(0|[1-9][0-9]*)(?=[./])", name)
    return (name, "") if found is None else (name[: found.start()] + "{n}" + name[found.end() :], found[0])


HUGGINGFACE = Table(
    rows=(
        Row("model.embed_tokens.weight", "embed_tokens/embedding", "keep"),
        Row("model.layers.{n}.input_layernorm.weight", "layers_{n}/input_layernorm/scale", "keep"),
        Row("model.layers.{n}.self_attn.q_proj.weight", "layers_{n}/self_attn/q_proj/kernel", "transpose"),
        Row("model.layers.{n}.self_attn.q_proj.bias", "layers_{n}/self_attn/q_proj/bias", "keep"),
        Row("model.layers.{n}.self_attn.k_proj.weight", "layers_{n}/self_attn/k_proj/kernel", "transpose"),
        Row("model.layers.{n}.self_attn.k_proj.bias", "layers_{n}/self_attn/k_proj/bias", "keep"),
        Row("model.layers.{n}.self_attn.v_proj.weight", "layers_{n}/self_attn/v_proj/kernel", "transpose"),
        Row("model.layers.{n}.self_attn.v_proj.bias", "layers_{n}/self_attn/v_proj/bias", "keep"),
        Row("model.layers.{n}.self_attn.o_proj.weight", "layers_{n}/self_attn/o_proj/kernel", "transpose"),
        Row("model.layers.{n}.self_attn.o_proj.bias", "layers_{n}/self_attn/o_proj/bias", "keep"),
        Row("model.layers.{n}.post_attention_layernorm.weight", "layers_{n}/post_attention_layernorm/scale", "keep"),
        Row("model.layers.{n}.mlp.gate_proj.weight", "layers_{n}/mlp/gate_proj/kernel", "transpose"),
        Row("model.layers.{n}.mlp.gate_proj.bias", "layers_{n}/mlp/gate_proj/bias", "keep"),
        Row("model.layers.{n}.mlp.up_proj.weight", "layers_{n}/mlp/up_proj/kernel", "transpose"),
        Row("model.layers.{n}.mlp.up_proj.bias", "layers_{n}/mlp/up_proj/bias", "keep"),
        Row("model.layers.{n}.mlp.down_proj.weight", "layers_{n}/mlp/down_proj/kernel", "transpose"),
        Row("model.layers.{n}.mlp.down_proj.bias", "layers_{n}/mlp/down_proj/bias", "keep"),
        Row("model.norm.weight", "norm/scale", "keep"),
        Row("lm_head.weight", "lm_head/kernel", "transpose"),
    ),
    ignored=(
        "model.layers.{n}.self_attn.rotary_emb.inv_freq",  # recomputed from the configuration
        "model.rotary_emb.inv_freq",
    ),
)

GGUF = Table(
    rows=(
        Row("token_embd.weight", "embed_tokens/embedding", "keep"),
        Row("blk.{n}.attn_norm.weight", "layers_{n}/input_layernorm/scale", "keep"),
        Row("blk.{n}.attn_q.weight", "layers_{n}/self_attn/q_proj/kernel", "query rows"),
        Row("blk.{n}.attn_q.bias", "layers_{n}/self_attn/q_proj/bias", "query rows"),
        Row("blk.{n}.attn_k.weight", "layers_{n}/self_attn/k_proj/kernel", "key rows"),
        Row("blk.{n}.attn_k.bias", "layers_{n}/self_attn/k_proj/bias", "key rows"),
        Row("blk.{n}.attn_v.weight", "layers_{n}/self_attn/v_proj/kernel", "transpose"),
        Row("blk.{n}.attn_v.bias", "layers_{n}/self_attn/v_proj/bias", "keep"),
        Row("blk.{n}.attn_output.weight", "layers_{n}/self_attn/o_proj/kernel", "transpose"),
        Row("blk.{n}.attn_output.bias", "layers_{n}/self_attn/o_proj/bias", "keep"),
        Row("blk.{n}.ffn_norm.weight", "layers_{n}/post_attention_layernorm/scale", "keep"),
        Row("blk.{n}.ffn_gate.weight", "layers_{n}/mlp/gate_proj/kernel", "transpose"),
        Row("blk.{n}.ffn_gate.bias", "layers_{n}/mlp/gate_proj/bias", "keep"),
        Row("blk.{n}.ffn_up.weight", "layers_{n}/mlp/up_proj/kernel", "transpose"),
        Row("blk.{n}.ffn_up.bias", "layers_{n}/mlp/up_proj/bias", "keep"),
        Row("blk.{n}.ffn_down.weight", "layers_{n}/mlp/down_proj/kernel", "transpose"),
        Row("blk.{n}.ffn_down.bias", "layers_{n}/mlp/down_proj/bias", "keep"),
        Row("output_norm.weight", "norm/scale", "keep"),
        Row("output.weight", "lm_head/kernel", "transpose"),
    ),
    ignored=("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"),  # read with the metadata
)

# What `lsjax.save` writes: the tree's own names and layouts.
FLAX = Table(rows=tuple(Row(row.flax, row.flax, "keep") for row in HUGGINGFACE.rows))


def source_shape(transform: Transform, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a format stores an array that has ``shape`` in Flax."""
    return shape if transform == "keep" else shape[::-1]


def to_flax_layout(transform: Transform, array: np.ndarray, config: LlamaConfig) -> np.ndarray:
    """A stored array in Flax's layout, as a view wherever that is possible."""
    if transform == "keep":
        return array
    if transform != "transpose":
        heads = config.num_attention_heads if transform == "query rows" else config.num_key_value_heads
        array = array.reshape(heads, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    return array.T
