"""A model's parameters: one pytree of a static configuration and a tree of arrays in Flax naming."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, overload

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, GetAttrKey

from lsjax.checks import check_depth, check_params, check_tokens
from lsjax.config import LlamaConfig
from lsjax.model.cache import LayerCache, init_cache
from lsjax.model.llama import Llama
from lsjax.model.shapes import parameter_shapes


class Model:
    """What the decode code calls, as plain functions of the arrays: the one base of ``Params`` and ``DecodeParams``.

    A pytree: the configuration is static, the arrays are its leaves.
    """

    config: LlamaConfig
    tree: dict[str, Any]

    @property
    def dtype(self) -> jnp.dtype:
        """The weights' dtype, which is also the cache's."""
        return jnp.dtype(self.tree["embed_tokens"]["embedding"].dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes that the arrays take."""
        return sum(math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(self.tree))

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Token ids ``[...]`` to hidden states ``[..., hidden]``."""
        return self.apply(tokens, method="embed")

    def run_layers(
        self, hidden: jax.Array, cache: Sequence[LayerCache], start: jax.Array | int, **kwargs: Any
    ) -> tuple[jax.Array, tuple[LayerCache, ...]]:
        """Layers ``[lo, hi)`` over cached positions; see :meth:`lsjax.model.llama.Llama.run_layers`."""
        return self.apply(hidden, cache, start, method="run_layers", **kwargs)

    def logits(self, hidden: jax.Array, first: jax.Array | int = 0, count: int | None = None) -> jax.Array:
        """The final norm and head over any layer's output: float32 ``[..., vocab]`` (or ``count`` from ``first``)."""
        return self.apply(hidden, first, count, method="logits")

    def draft_logits(self, hidden: jax.Array) -> jax.Array:
        """As :meth:`logits`, where drafts are chosen from them; -inf for ids outside of a draft vocabulary."""
        return self.apply(hidden, method="draft_logits")

    def init_cache(self, batch: int, slots: int, num_layers: int) -> tuple[LayerCache, ...]:
        """Empty caches for the first ``num_layers`` layers, in the weights' dtype."""
        return init_cache(self.config, batch, slots, num_layers, self.dtype)

    def apply(self, *args: Any, **kwargs: Any) -> Any:
        """The Flax module's own ``apply`` over these arrays."""
        return self.module.apply({"params": self.tree}, *args, **kwargs)

    @property
    def module(self) -> Llama:
        """The Flax module that reads these arrays."""
        return Llama(self.config)

    def tree_flatten_with_keys(self):
        """JAX's hook: the arrays, and the configuration as static data."""
        return ((GetAttrKey("tree"), self.tree),), self.config

    @classmethod
    def tree_unflatten(cls, config: LlamaConfig, children: tuple[Any]) -> Self:
        """JAX's hook; it unflattens placeholders too, so nothing is checked here."""
        model = object.__new__(cls)
        model.config, model.tree = config, children[0]
        return model


@jax.tree_util.register_pytree_with_keys_class
class Params(Model):
    """A Llama's configuration (static, hashable) and its arrays: one array for each tensor of a checkpoint.

    The tree is always canonical, so that saving, gradients, optax, orbax and sharding work on it as it is, and
    ``Llama(config).apply({"params": params.tree}, tokens)`` reads it too.

    Args:
        config: the model's configuration.
        tree: nested dictionaries of floating-point arrays, named and shaped as ``Llama(config).init`` makes them
            (``abstract_tree`` lists them). Abstract arrays (``jax.ShapeDtypeStruct``) are allowed.

    Raises:
        ValueError: names every missing, unexpected or wrongly shaped array.
    """

    def __init__(self, config: LlamaConfig, tree: Mapping[str, Any]) -> None:
        self.config = config
        leaves = flatten(tree)
        self.tree = unflatten(leaves)  # plain dictionaries of our own, whatever mapping came; the arrays are not copied
        problems = _mismatches(flatten(abstract_tree(config)), leaves)
        if problems:
            raise ValueError("parameters do not fit the configuration:\n  " + "\n  ".join(problems))

    @classmethod
    def abstract(cls, config: LlamaConfig, dtype: Any = jnp.float32) -> Params:
        """Shapes and dtypes alone, at no cost whatever the model's size (for ``jax.eval_shape``, sharding, sizes)."""
        return cls(config, abstract_tree(config, dtype))

    @property
    def num_parameters(self) -> int:
        """How many numbers the model has; tied weights count once."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.tree))

    def __repr__(self) -> str:
        return f"Params({self.num_parameters:,} parameters, {self.config!r})"


def init(config: LlamaConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters: matrices normal with ``config.initializer_range``, norms 1, biases 0.

    Args:
        config: the model's configuration.
        key: a JAX random key.
        dtype: the arrays' dtype.
    """
    return draw(config, key, lambda path, shape: config.initializer_range, dtype)


def draw(
    config: LlamaConfig, key: jax.Array, spread: Callable[[str, tuple[int, ...]], float], dtype: Any = jnp.float32
) -> Params:
    """Random parameters: matrices normal with a standard deviation each, norms 1, biases 0.

    Args:
        config: the model's configuration.
        key: a JAX random key; each array has its own, by its place in the tree.
        spread: the deviation of the array of a path (as of :func:`flatten`) and shape.
        dtype: the arrays' dtype; numbers are drawn in float32.
    """
    leaves = flatten(abstract_tree(config, dtype))
    drawn = {
        path: _init_leaf(jax.random.fold_in(key, index), spread(path, leaf.shape), path.split("/")[-1], leaf)
        for index, (path, leaf) in enumerate(leaves.items())
    }
    return Params(config, unflatten(drawn))


@functools.partial(jax.jit, static_argnums=(2, 3))
def _init_leaf(key: jax.Array, spread: float, name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
    """As the modules' own initializers do, but compiled once a shape: all of them in one program take 20 seconds."""
    if name in ("scale", "bias"):
        return jnp.full(like.shape, name == "scale", like.dtype)
    return (spread * jax.random.normal(key, like.shape)).astype(like.dtype)


def abstract_tree(config: LlamaConfig, dtype: Any = jnp.float32) -> dict[str, Any]:
    """The names, shapes and dtypes that a parameter tree must have, as ``jax.ShapeDtypeStruct``."""
    shapes = parameter_shapes(config)
    return unflatten({path: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for path, shape in shapes.items()})


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter tree as ``{"layers_0/mlp/up_proj/kernel": array, ...}``."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return {"/".join(str(key.key if isinstance(key, DictKey) else key) for key in path): leaf for path, leaf in leaves}


def unflatten(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`flatten`."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def _mismatches(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """What is wrong with a flat tree, one line for each array."""
    problems = [f"missing: {path} {tuple(expected[path].shape)}" for path in sorted(expected.keys() - found.keys())]
    for path, leaf in sorted(found.items()):
        shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
        if path not in expected:
            problems.append(f"unexpected: {path}")
        elif shape is None or dtype is None:
            problems.append(f"{path}: expected an array, got {type(leaf).__name__}")
        elif tuple(shape) != tuple(expected[path].shape):
            problems.append(f"{path}: expected the shape {tuple(expected[path].shape)}, got {tuple(shape)}")
        elif not jnp.issubdtype(dtype, jnp.floating) or jnp.dtype(dtype).itemsize < 2:
            problems.append(f"{path}: expected floating-point numbers of at least 16 bits, got {dtype}")
    return problems


# The axis of a kernel that is split between devices: heads or columns of what follows from them; the biases alike.
_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")


def tensor_parallel(config: LlamaConfig, mesh: Mesh, axis: str) -> Params:
    """Where each array lies when attention heads and the MLP's columns are split between devices (arXiv 1909.08053).

    Every device holds its heads of each layer, and so its part of the cache; embedding, norms and head are whole on
    every one. A layer costs two sums over the devices, after attention and after the MLP; nothing of the cache moves.

    Args:
        config: the model's configuration.
        mesh: the devices. Axes that are explicit, as ``jax.make_mesh`` makes them by default, are taken as automatic.
        axis: the axis of the mesh to split over.

    Returns:
        ``Params`` of one ``jax.sharding.NamedSharding`` an array, for ``jax.device_put`` or ``in_shardings``.

    Raises:
        ValueError: no such axis, or heads or columns that the devices cannot share evenly.

    Example:
        >>> params = jax.device_put(params, lsjax.tensor_parallel(params.config, mesh, "model"))
    """
    if axis not in mesh.axis_names:
        raise ValueError(f"axis: expected one of {', '.join(map(repr, mesh.axis_names))}, got {axis!r}")
    parts = mesh.shape[axis]
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    uneven = [f"{name} {getattr(config, name)}" for name in names if getattr(config, name) % parts]
    if uneven:
        raise ValueError(f"{parts} devices along {axis!r} cannot share evenly: {', '.join(uneven)}")

    mesh = Mesh(mesh.devices, mesh.axis_names)  # automatic axes: XLA places what lies between the arrays

    def place(path: str) -> NamedSharding:
        *_, module, kind = path.split("/")
        if module in _COLUMNS:
            return NamedSharding(mesh, PartitionSpec(None, axis) if kind == "kernel" else PartitionSpec(axis))
        return NamedSharding(mesh, PartitionSpec(axis) if (module in _ROWS and kind == "kernel") else PartitionSpec())

    tree = unflatten({path: place(path) for path in flatten(abstract_tree(config))})
    return Params.tree_unflatten(config, (tree,))


@overload
def forward(params: Model, tokens: Any, *, num_layers: int | None = None) -> jax.Array: ...


@overload
def forward(params: Model, tokens: Any, *, exits: Sequence[int]) -> tuple[jax.Array, ...]: ...


def forward(
    params: Model, tokens: Any, *, num_layers: int | None = None, exits: Sequence[int] | None = None
) -> jax.Array | tuple[jax.Array, ...]:
    """Teacher-forced logits of the first layers, the final norm and the head (the early exit of arXiv 2404.16710).

    Args:
        params: the model.
        tokens: int ``[length]`` or ``[batch, length]``. A row's padding on the right does not reach what is before it
            (but longrope's factors are those of a text of this length, padding included).
        num_layers: static; how many layers to run, None for all.
        exits: static; several depths at once, each layer still running once.

    Returns:
        float32 ``[batch, length, vocab]`` (``[length, vocab]`` for one row); with ``exits`` a tuple of these in the
        order given.

    Raises:
        ValueError: both depths given; a depth outside 1..num_hidden_layers; no tokens, or ids outside the vocabulary.

    Example:
        >>> logits = lsjax.forward(params, tokens, num_layers=4)
        >>> shallow, deep = lsjax.forward(params, tokens, exits=(4, 16))
    """
    check_params(params)
    if num_layers is not None and exits is not None:
        raise ValueError("give num_layers or exits, not both")
    if exits is not None and not exits:
        raise ValueError("exits: expected at least one layer, got none")
    depth = params.config.num_hidden_layers if num_layers is None else num_layers
    if exits is None:
        depths = (check_depth("num_layers", depth, params.config),)
    else:
        depths = tuple(check_depth("exits", depth, params.config) for depth in exits)
    rows, single = check_tokens(tokens, params.config)
    found = _forward(params, rows, depths)
    found = tuple(logits[0] for logits in found) if single else found
    return found[0] if exits is None else found


@functools.partial(jax.jit, static_argnums=2)
def _forward(params: Model, tokens: jax.Array, exits: tuple[int, ...]) -> tuple[jax.Array, ...]:
    return params.apply(tokens, exits=exits)
