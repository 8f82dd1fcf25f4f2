"""The model's configuration: what transformers writes to ``config.json``, frozen and checked."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Mapping
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3")
_LARGEST_INT = 2**31 - 1  # sizes, ids and positions are int32 on devices
_LARGEST_HEAD = 2**16  # rotary angles are made on the host, whatever the weights turn out to be
_LARGEST_NUMBER = 1e30  # with its powers and quotients still in float32's range
_THETA = 10000.0  # where a configuration names none

# Entries of a rope dictionary by type, beside ``rope_type`` and ``rope_theta``.
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the length that a model was first trained on.

    Attributes:
        rope_type: ``"linear"`` (position interpolation, arXiv 2306.15595) or ``"llama3"`` (the frequency bands of
            Llama 3.1). A model without scaling has no ``RopeScaling`` at all.
        factor: the stretch, at least 1.
        low_freq_factor: llama3: wavelengths above ``original_max_position_embeddings / low_freq_factor`` are
            stretched by the whole factor.
        high_freq_factor: llama3: wavelengths below ``original_max_position_embeddings / high_freq_factor`` stay.
        original_max_position_embeddings: llama3: the length before stretching, in tokens.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES or self.rope_type == "default":
            raise ValueError(f"rope_type: expected one of {', '.join(ROPE_TYPES)}, got {self.rope_type!r}")
        for name in _ROPE_KEYS["llama3"]:
            value = getattr(self, name)
            if name not in _ROPE_KEYS[self.rope_type]:
                if value is not None:
                    raise ValueError(f"{name} has no meaning for rope_type {self.rope_type!r}, got {value!r}")
            elif not _is_number(value) or value <= 0:
                raise ValueError(f"{name} of rope_type {self.rope_type!r}: expected a number above 0, got {value!r}")
        if self.factor < 1:
            raise ValueError(f"factor of rope_type {self.rope_type!r}: expected at least 1, got {self.factor!r}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            raise ValueError(f"high_freq_factor must exceed low_freq_factor, got {high!r} and {low!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Everything static about a Llama: hashable, so that it can be a static argument of ``jax.jit``.

    The fields have transformers' names and defaults. ``rope_scaling`` also takes the dictionary of a ``config.json``;
    ``eos_token_id`` also takes an int, a list or None, and is stored as a tuple (empty: never stop).

    Raises:
        ValueError: a field is of the wrong type or range, or two fields contradict each other.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 0  # 0: as many as attention heads
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = _THETA
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = 1
    eos_token_id: tuple[int, ...] = (2,)
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if not self.num_key_value_heads:
            put("num_key_value_heads", self.num_attention_heads)
        for name in _POSITIVE_INTS:
            if not _is_int(getattr(self, name)) or getattr(self, name) < 1:
                raise ValueError(f"{name}: expected an int above 0, got {getattr(self, name)!r}")
            if getattr(self, name) > _LARGEST_INT:
                raise ValueError(f"{name}: expected at most {_LARGEST_INT}, got {getattr(self, name)}")
        if not self.head_dim:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}: give head_dim"
                )
            put("head_dim", self.hidden_size // self.num_attention_heads)
        if not _is_int(self.head_dim) or self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim: expected an even int above 0, got {self.head_dim!r}")
        if self.head_dim > _LARGEST_HEAD or self.head_dim * self.num_attention_heads > _LARGEST_INT:
            raise ValueError(
                f"head_dim: expected at most {_LARGEST_HEAD}, and {_LARGEST_INT} over all heads, "
                f"got {self.head_dim} for {self.num_attention_heads}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            if not _is_number(value) or value < 1 / _LARGEST_NUMBER:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
            put(name, float(value))
        for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected true or false, got {getattr(self, name)!r}")
        if isinstance(self.rope_scaling, Mapping):
            outer = None if self.rope_theta == _THETA else self.rope_theta
            theta, scaling = _read_rope(self.rope_scaling, outer, self.max_position_embeddings)
            put("rope_theta", theta)
            put("rope_scaling", scaling)
        elif not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(f"rope_scaling: expected a dictionary or RopeScaling, got {self.rope_scaling!r}")
        put("eos_token_id", token_ids("eos_token_id", self.eos_token_id))
        for name in ("bos_token_id", "pad_token_id"):
            value = getattr(self, name)
            if value is not None and not _is_int(value):
                raise ValueError(f"{name}: expected an int or None, got {value!r}")
            if value is not None and value > _LARGEST_INT:
                raise ValueError(f"{name}: expected at most {_LARGEST_INT}, got {value}")
            if value is not None and value < 0:  # some checkpoints write -1 for "none"
                put(name, None)

    @property
    def num_key_value_groups(self) -> int:
        """Query heads that share one key and value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> LlamaConfig:
        """Reads the contents of a ``config.json``, as transformers 4 and transformers 5 write it.

        Args:
            config: the parsed ``config.json``. Entries that do not change what the model computes are passed over.
            generation_config: the parsed ``generation_config.json``; its special token ids win, as in transformers.

        Raises:
            ValueError: not a Llama; a feature that lsjax does not compute; missing sizes; entries that contradict.
        """
        if not isinstance(config, Mapping):
            raise ValueError(f"config.json: expected an object, got {type(config).__name__}")
        model_type = config.get("model_type")
        if model_type != "llama":
            raise ValueError(f"model_type: expected 'llama', got {model_type!r}; lsjax reads Llama checkpoints only")
        _refuse_unsupported(config)
        absent = [name for name in _SIZES if name not in config]
        if absent:
            raise ValueError(f"config.json lacks {', '.join(absent)}")
        fields = {field.name for field in dataclasses.fields(cls)} - {"rope_theta", "rope_scaling"}
        given = {name: config[name] for name in fields & config.keys()}
        for name in ("num_key_value_heads", "head_dim"):
            if given.get(name, 0) is None:
                del given[name]
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if (generation_config or {}).get(name) is not None:
                given[name] = (generation_config or {})[name]
        theta, scaling = _rope_of(config, given.get("max_position_embeddings", 2048))
        return cls(**given, rope_theta=theta, rope_scaling=scaling)

    def to_dict(self) -> dict[str, Any]:
        """The contents of a ``config.json`` that transformers 4 and 5 both read."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name != "rope_scaling"}
        if self.rope_scaling is not None:
            scaling = dataclasses.asdict(self.rope_scaling)
            fields["rope_scaling"] = {name: value for name, value in scaling.items() if value is not None}
        eos = self.eos_token_id
        fields["eos_token_id"] = None if not eos else eos[0] if len(eos) == 1 else list(eos)
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", **fields}


_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_POSITIVE_INTS = (*_SIZES, "num_key_value_heads", "max_position_embeddings")


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """One id, several or None, as a tuple of ids.

    Raises:
        ValueError: an entry is no int, below 0, or too large for int32.
    """
    if value is None:
        return ()
    several = isinstance(value, Iterable) and not isinstance(value, str | Mapping) and getattr(value, "ndim", 1)
    ids: tuple[Any, ...] = tuple(value) if several else (value,)
    try:
        found = tuple(operator.index(token) for token in ids if not isinstance(token, bool))
    except TypeError:
        found = ()
    if len(found) < len(ids) or not all(0 <= token < 2**31 for token in found):
        raise ValueError(f"{name}: expected token ids of at least 0, got {value!r}")
    return found


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_NUMBER


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Entries that change what a model computes, and that lsjax would otherwise silently leave out."""
    expected = {
        "hidden_act": ("silu", "swish"),
        "partial_rotary_factor": (1, 1.0),
        "quantization_config": (),
        "sliding_window": (),
    }
    for name, values in expected.items():
        value = config.get(name)
        if value is not None and value not in values:
            wanted = " or ".join(map(repr, values)) if values else "none"
            raise ValueError(f"{name}: expected {wanted}, got {value!r}")


def _rope_of(config: Mapping[str, Any], max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """Theta and scaling from ``rope_theta`` + ``rope_scaling`` (v4) or ``rope_parameters`` (v5), or both agreeing."""
    theta = config.get("rope_theta")
    readings = {
        name: _read_rope(config[name], theta, max_position_embeddings)
        for name in ("rope_scaling", "rope_parameters")
        if config.get(name) is not None
    }
    first, *others = readings.values() or [None]
    if any(other != first for other in others):
        raise ValueError(
            f"rope_scaling and rope_parameters contradict each other: {config['rope_scaling']!r} and "
            f"{config['rope_parameters']!r}"
        )
    for reading in readings.values():
        return reading
    return (_THETA if theta is None else theta), None


def _read_rope(rope: Any, outer_theta: float | None, max_position_embeddings: int) -> tuple[float, RopeScaling | None]:
    """One rope dictionary; every entry is used or refused."""
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope parameters: expected an object, got {rope!r}")
    entries = {name: value for name, value in rope.items() if value is not None}
    old_type, rope_type = entries.pop("type", None), entries.pop("rope_type", None)
    if None not in (old_type, rope_type) and old_type != rope_type:
        raise ValueError(f"rope parameters contradict themselves: type {old_type!r} and rope_type {rope_type!r}")
    rope_type = next((value for value in (rope_type, old_type) if value is not None), "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type {rope_type!r} is not supported: expected one of {', '.join(ROPE_TYPES)}")
    inner_theta = entries.pop("rope_theta", None)
    if None not in (inner_theta, outer_theta) and inner_theta != outer_theta:
        raise ValueError(f"rope_theta is given twice and differs: {outer_theta!r} and {inner_theta!r}")
    theta = next((value for value in (inner_theta, outer_theta) if value is not None), _THETA)
    if entries.get("partial_rotary_factor") in (1, 1.0):
        del entries["partial_rotary_factor"]
    if rope_type == "llama3":
        entries.setdefault("original_max_position_embeddings", max_position_embeddings)
    unknown = sorted(entries.keys() - set(_ROPE_KEYS[rope_type]))
    absent = sorted(set(_ROPE_KEYS[rope_type]) - entries.keys())
    if unknown or absent:
        raise ValueError(
            f"rope_type {rope_type!r}: expected the entries {', '.join(_ROPE_KEYS[rope_type]) or 'rope_theta only'}; "
            f"missing {', '.join(absent) or 'none'}, unexpected {', '.join(unknown) or 'none'}"
        )
    return theta, None if rope_type == "default" else RopeScaling(rope_type=rope_type, **entries)
