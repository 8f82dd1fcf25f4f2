"""What only decoding wants: a model's weights in the form that a step reads fastest."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsjax.checks import as_array, check_int, check_params, is_traced
from lsjax.config import LlamaConfig
from lsjax.model.llama import Llama
from lsjax.params import Model, Params


@jax.tree_util.register_pytree_with_keys_class
class DecodeParams(Model):
    """A model's weights prepared for decoding; :func:`prepare` makes it, and everything that decodes takes it.

    The same numbers as ``Params`` in fewer arrays: one product for queries, keys and values, one for the MLP's gate and
    up projections; and on CPUs transposed, ``[out, in]``. With a draft vocabulary a head of its rows besides.
    """

    @property
    def module(self) -> Llama:
        """The Flax module that reads these arrays."""
        transposed = "weight" in self.tree["layers_0"]["mlp"]["down_proj"]
        return Llama(self.config, fused=True, transposed=transposed, draft_vocab_size=self.draft_vocab_size)

    @property
    def draft_vocab_size(self) -> int:
        """How many ids drafts are chosen from by a head of their own; 0: from all of them."""
        return self.tree["draft_head"]["weight"].shape[0] if "draft_head" in self.tree else 0

    def __repr__(self) -> str:
        return f"DecodeParams({self.config!r})"


def prepare(
    params: Params | DecodeParams, *, donate: bool = False, draft_vocab: Any = None, draft_text: Any = None
) -> DecodeParams:
    """Puts a model's weights into the form that decoding reads fastest: once, before many calls of ``generate``.

    The text stays the same, up to ties of rounding. Arrays that need no other form are shared with ``params``, whose
    sharding the new ones follow.

    Args:
        params: the model; one that is prepared comes back as it is, but for the draft vocabulary.
        donate: deletes each array of ``params`` that is replaced as soon as its replacement is made, so that no more
            than one layer's weights exist twice. ``params`` cannot be used after.
        draft_vocab: the ids that drafts are chosen from, so that the draft reads only their rows of the head; or how
            many, and then the EOS ids and the most frequent ids of ``draft_text``. None: all ids (or, of one that is
            prepared, as it is). The text stays the same whatever they are, since every id is verified; ids that are
            left out are never drafted. Costs a copy of these rows.
        draft_text: int ids of any shape, a text like those to be written, where ``draft_vocab`` is a count.

    Raises:
        ValueError: ``donate`` inside a ``jit``; ids outside the vocabulary, none, or more than there are.

    Example:
        >>> prepared = lsjax.prepare(params)
        >>> out = lsjax.generate(prepared, tokens, exit_layer=4)
    """
    check_params(params)
    ids = _draft_ids(params.config, draft_vocab, draft_text)
    if isinstance(params, DecodeParams):
        return params if ids is None else _with_draft_head(params, ids)
    if donate and is_traced(params):
        raise ValueError("donate: expected False inside jit, where XLA decides what lives on, got True")
    # CPUs read [out, in] as fast for one position, and up to twice as fast for the several that a check reads.
    transposed = _platform(params.tree["embed_tokens"]["embedding"]) == "cpu"
    tree: dict[str, Any] = {}
    for name, module in params.tree.items():
        if name.startswith("layers_"):
            module = _prepare_layer(module, params.config, transposed, donate)
        elif name == "lm_head" and transposed:
            module = _replace(module, _transposed(module), donate)
        tree[name] = module
    prepared = DecodeParams.tree_unflatten(params.config, (tree,))
    return prepared if ids is None else _with_draft_head(prepared, ids)


def _draft_ids(config: LlamaConfig, draft_vocab: Any, draft_text: Any) -> np.ndarray | None:
    """Rising ids int32 ``[count]``; None: all."""
    if draft_vocab is None:
        if draft_text is not None:
            raise ValueError("draft_text: expected a count as draft_vocab with it, got None")
        return None
    vocab = config.vocab_size
    given = as_array("draft_vocab", draft_vocab, expected="ids or a count of them")
    if is_traced(given):
        raise TypeError("draft_vocab: expected concrete ids, since they decide what is copied; got traced ones")
    if given.ndim == 0:
        count = check_int("draft_vocab", given.item(), 1, vocab)
        if draft_text is None:
            raise ValueError(f"draft_text: expected a text's ids with draft_vocab={count}, a count; got None")
        text = as_array("draft_text", draft_text)
        frequency = np.bincount(_in_vocabulary("draft_text", text.reshape(-1), vocab), minlength=vocab)
        stops = [token for token in config.eos_token_id if token < vocab]
        frequency[stops] = np.iinfo(frequency.dtype).max  # or a draft could not end a text
        given = np.argsort(-frequency, stable=True)[:count]
    elif draft_text is not None:
        raise ValueError("draft_vocab: expected a count with draft_text, got ids")
    ids = np.unique(_in_vocabulary("draft_vocab", given.reshape(-1), vocab)).astype(np.int32)
    if not ids.size:
        raise ValueError("draft_vocab: expected at least one id, got none")
    return ids


def _in_vocabulary(name: str, ids: np.ndarray, vocab: int) -> np.ndarray:
    outside = (ids < 0) | (ids >= vocab)
    if outside.any():
        raise ValueError(f"{name}: expected ids in 0..{vocab - 1}, got {ids[outside][0]}")
    return ids


def _with_draft_head(params: DecodeParams, ids: np.ndarray) -> DecodeParams:
    if params.config.tie_word_embeddings:
        rows = _take(params.tree["embed_tokens"]["embedding"], ids, 0)
    elif "weight" in params.tree["lm_head"]:
        rows = _take(params.tree["lm_head"]["weight"], ids, 0)
    else:
        rows = _take(params.tree["lm_head"]["kernel"], ids, 1)
    columns = np.full(params.config.vocab_size, len(ids), np.int32)
    columns[ids] = np.arange(len(ids))
    head = {"weight": rows, "columns": jnp.asarray(columns)}
    return DecodeParams.tree_unflatten(params.config, (params.tree | {"draft_head": head},))


@functools.partial(jax.jit, static_argnums=2)
def _take(matrix: jax.Array, ids: jax.Array, axis: int) -> jax.Array:
    """Rows or columns of a matrix as rows."""
    return jnp.take(matrix, ids, axis=axis) if axis == 0 else jnp.take(matrix, ids, axis=axis).T


def _prepare_layer(layer: dict[str, Any], config: LlamaConfig, transposed: bool, donate: bool) -> dict[str, Any]:
    attention, mlp = layer["self_attn"], layer["mlp"]
    queries, keys, values, out = (attention[name] for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    gate, up, down = (mlp[name] for name in ("gate_proj", "up_proj", "down_proj"))
    joined = {
        kind: _join_heads(queries[kind], keys[kind], values[kind], config.num_key_value_heads) for kind in queries
    }
    columns = {kind: _join_columns(gate[kind], up[kind]) for kind in gate}
    attention = {"qkv_proj": joined, "o_proj": out}
    mlp = {"gate_up_proj": columns, "down_proj": down}
    if transposed:
        attention, mlp = ({name: _transposed(module) for name, module in part.items()} for part in (attention, mlp))
    layer, old = {**layer, "self_attn": attention, "mlp": mlp}, layer
    return _replace(old, layer, donate)


def _replace(old: dict[str, Any], new: dict[str, Any], donate: bool) -> dict[str, Any]:
    """The new arrays, made; the old ones that are not among them deleted if they are donated."""
    if donate:
        kept = {id(leaf) for leaf in jax.tree.leaves(jax.block_until_ready(new))}
        for leaf in jax.tree.leaves(old):
            if id(leaf) not in kept:
                leaf.delete()
    return new


def _transposed(module: dict[str, Any]) -> dict[str, Any]:
    """``kernel`` ``[in, ...]`` to ``weight`` ``[..., in]``; a bias stays."""
    return {"weight": _move_first_last(module["kernel"])} | {k: v for k, v in module.items() if k != "kernel"}


# One small program each, whatever the number of layers.
@jax.jit
def _move_first_last(kernel: jax.Array) -> jax.Array:
    return jnp.moveaxis(kernel, 0, -1)


@jax.jit
def _join_columns(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``[..., columns]`` each, to ``[..., 2, columns]``."""
    return jnp.stack([gate, up], axis=-2)


@functools.partial(jax.jit, static_argnums=3)
def _join_heads(queries: jax.Array, keys: jax.Array, values: jax.Array, kv_heads: int) -> jax.Array:
    """``[..., heads · head_dim]`` each, to ``[..., kv_heads, group + 2, head_dim]``."""
    parts = [x.reshape(*x.shape[:-1], kv_heads, -1, keys.shape[-1] // kv_heads) for x in (queries, keys, values)]
    return jnp.concatenate(parts, axis=-2)


def _platform(array: Any) -> str:
    """Where an array lies: ``"cpu"``, ``"gpu"`` or ``"tpu"``; inside a ``jit``, where it will most likely run."""
    if is_traced(array) or not isinstance(array, jax.Array):
        return jax.default_backend()
    return next(iter(array.devices())).platform
