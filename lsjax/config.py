"""The model's configuration: what transformers writes to ``config.json``, frozen and checked."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

_LARGEST_INT = 2**31 - 1  # sizes, ids and positions are int32 on devices
_LARGEST_HEAD = 2**16  # rotary angles are made on the host, whatever the weights turn out to be
_LARGEST_NUMBER = 1e15  # products and quotients of two are in float32's range
_THETA = 10000.0  # where a configuration names none

# Entries of a rope dictionary by type, beside ``rope_type`` and ``rope_theta``: those that it must have, and may have.
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("factor", "original_max_position_embeddings", "short_factor", "long_factor"), ("attention_factor",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
}
ROPE_TYPES = tuple(_ROPE_KEYS)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched past the length that a model was first trained on.

    Whatever the type, what a position is rotated by is a function of the position and, for longrope, of the length
    that a text may come to; never of the texts beside it, nor of what has been generated so far.

    Attributes:
        rope_type: ``"linear"`` (position interpolation, arXiv 2306.15595); ``"dynamic"`` (NTK-aware, section 3.1 of
            arXiv 2309.00071): the default up to ``max_position_embeddings``, then a base that grows with each position
            alone; ``"yarn"`` (arXiv 2309.00071); ``"longrope"`` (arXiv 2402.13753): one list of factors for texts up
            to the original length and one for longer texts; ``"llama3"`` (the frequency bands of Llama 3.1). A model
            without scaling has no ``RopeScaling`` at all.
        factor: the stretch, at least 1; longrope: only its attention factor follows from it.
        low_freq_factor: llama3: wavelengths above ``original_max_position_embeddings / low_freq_factor`` are
            stretched by the whole factor.
        high_freq_factor: llama3: wavelengths below ``original_max_position_embeddings / high_freq_factor`` stay.
        original_max_position_embeddings: llama3, yarn, longrope: the length before stretching, in tokens.
        attention_factor: yarn, longrope: cosines and sines are multiplied by it; None: what the papers say.
        beta_fast: yarn: channels that turn more often than this in the original length stay; None: 32.
        beta_slow: yarn: channels that turn less often than this are stretched by the whole factor; None: 1.
        mscale: yarn: with ``mscale_all_dim``, the attention factor is the ratio of the paper's factor with its 0.1
            multiplied by the one and by the other (DeepSeek-V2, arXiv 2405.04434); one alone changes nothing.
        mscale_all_dim: yarn: see ``mscale``.
        truncate: yarn: whether the two channels between which the stretch passes over are rounded outwards.
        short_factor: longrope: what divides each frequency, ``head_dim / 2`` numbers.
        long_factor: longrope: the same for texts above ``original_max_position_embeddings``.
    """

    rope_type: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES or self.rope_type == "default":
            raise ValueError(f"rope_type: expected one of {', '.join(ROPE_TYPES)}, got {self.rope_type!r}")
        required, optional = _ROPE_KEYS[self.rope_type]
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name in required or (field.name in optional and value is not field.default):
                self._check(field.name, value)
            elif value is not field.default:
                raise ValueError(f"{field.name} has no meaning for rope_type {self.rope_type!r}, got {value!r}")
        if self.rope_type == "yarn":  # two ways to say the same are one configuration
            object.__setattr__(self, "beta_fast", 32.0 if self.beta_fast is None else self.beta_fast)
            object.__setattr__(self, "beta_slow", 1.0 if self.beta_slow is None else self.beta_slow)
        if self.factor < 1:
            raise ValueError(f"factor of rope_type {self.rope_type!r}: expected at least 1, got {self.factor!r}")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and high <= low:
            raise ValueError(f"high_freq_factor must exceed low_freq_factor, got {high!r} and {low!r}")
        slow, fast = self.beta_slow, self.beta_fast
        if slow is not None and fast is not None and fast < slow:
            raise ValueError(f"beta_fast must be at least beta_slow, got {fast!r} and {slow!r}")

    def _check(self, name: str, value: Any) -> None:
        """Refuses a value of the wrong kind; lists become tuples, so that a configuration can be hashed."""
        fits, wanted = _is_number(value) and value > 0, "a number above 0"
        if name == "original_max_position_embeddings":
            fits, wanted = _is_int(value) and 1 < value <= _LARGEST_INT, "an int above 1"
        elif name in ("mscale", "mscale_all_dim"):
            fits, wanted = _is_number(value) and value >= 0, "a number of at least 0"
        elif name == "truncate":
            fits, wanted = isinstance(value, bool), "true or false"
        elif name in ("short_factor", "long_factor"):
            numbers = tuple(value) if isinstance(value, list | tuple) else ()
            fits = bool(numbers) and all(_is_number(number) and number > 0 for number in numbers)
            wanted = "a list of numbers above 0"
            object.__setattr__(self, name, numbers)
        if not fits:
            raise ValueError(f"{name} of rope_type {self.rope_type!r}: expected {wanted}, got {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """The entries of a rope dictionary, without ``rope_theta``."""
        required, optional = _ROPE_KEYS[self.rope_type]
        entries = {name: getattr(self, name) for name in ("rope_type", *required, *optional)}
        lists = {name: list(value) for name, value in entries.items() if isinstance(value, tuple)}
        return {name: value for name, value in (entries | lists).items() if value is not None}


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
            if not _is_number(value) or value <= 0:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")
            put(name, float(value))
        for name in ("attention_bias", "mlp_bias", "tie_word_embeddings"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected true or false, got {getattr(self, name)!r}")
        if isinstance(self.rope_scaling, Mapping):
            outer = None if self.rope_theta == _THETA else self.rope_theta
            theta, scaling = _read_rope(self.rope_scaling, outer, self.max_position_embeddings, None)
            put("rope_theta", theta)
            put("rope_scaling", scaling)
        elif not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(f"rope_scaling: expected a dictionary or RopeScaling, got {self.rope_scaling!r}")
        _check_rope_fits(self)
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

    @property
    def trained_length(self) -> int:
        """Tokens up to which texts are good: dynamic NTK alone goes beyond ``max_position_embeddings``."""
        scaling = self.rope_scaling
        stretch = scaling.factor if scaling is not None and scaling.rope_type == "dynamic" else 1
        return math.floor(self.max_position_embeddings * stretch)

    @property
    def short_length(self) -> int | None:
        """longrope: tokens up to which a text has the short factors; None: all texts are rotated alike."""
        scaling = self.rope_scaling
        if scaling is None or scaling.short_factor == scaling.long_factor:
            return None
        return scaling.original_max_position_embeddings

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
            fields["rope_scaling"] = self.rope_scaling.to_dict()
            if self.rope_scaling.rope_type == "longrope":  # transformers 4 looks for it here only
                name = "original_max_position_embeddings"
                fields[name] = self.rope_scaling.original_max_position_embeddings
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
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or 1 / _LARGEST_NUMBER <= abs(value) <= _LARGEST_NUMBER


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
    original = config.get("original_max_position_embeddings")
    readings = {
        name: _read_rope(config[name], theta, max_position_embeddings, original)
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


def _read_rope(
    rope: Any, outer_theta: float | None, max_position_embeddings: int, outer_original: int | None
) -> tuple[float, RopeScaling | None]:
    """One rope dictionary, and what may stand beside it; every entry is used or refused."""
    if not isinstance(rope, Mapping):
        raise ValueError(f"rope parameters: expected an object, got {rope!r}")
    # transformers takes a null for "not said", except that a null ``truncate`` says no.
    entries: dict[str, Any] = {n: value for n, value in rope.items() if value is not None or n == "truncate"}
    old_type, rope_type = (_type_name(entries.pop(name, None)) for name in ("type", "rope_type"))
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
    required, optional = _ROPE_KEYS[rope_type]
    name = "original_max_position_embeddings"
    if name in required:
        # Beside the dictionary it wins, as in transformers, which writes the maximum into the dictionary nevertheless.
        original = entries.pop(name, None) if outer_original is None else outer_original
        entries[name] = max_position_embeddings if original is None else original
        implied = rope_type == "longrope" or (rope_type == "yarn" and original is not None)
        if implied and "factor" not in entries:
            entries["factor"] = _ratio(max_position_embeddings, entries[name])
    unknown = sorted(entries.keys() - {*required, *optional})
    absent = sorted(set(required) - entries.keys())
    if unknown or absent:
        may = f" and perhaps {', '.join(optional)}" if optional else ""
        raise ValueError(
            f"rope_type {rope_type!r}: expected the entries {', '.join(required) or 'rope_theta only'}{may}; "
            f"missing {', '.join(absent) or 'none'}, unexpected {', '.join(unknown) or 'none'}"
        )
    scaling = None if rope_type == "default" else RopeScaling(rope_type=rope_type, **entries)
    return theta, scaling


def _type_name(rope_type: Any) -> Any:
    return "longrope" if rope_type == "su" else rope_type  # Phi-3's first name for it


def _ratio(max_position_embeddings: Any, original: Any) -> float | None:
    """The stretch that two lengths imply; None where one is no length, which is for others to refuse."""
    lengths = (max_position_embeddings, original)
    return (
        max_position_embeddings / original
        if all(_is_int(length) and 0 < length <= _LARGEST_INT for length in lengths)
        else None
    )


def _check_rope_fits(config: LlamaConfig) -> None:
    """What a scaling asks of the rest of the configuration."""
    scaling, pairs = config.rope_scaling, config.head_dim // 2
    if scaling is None:
        return
    for name in ("short_factor", "long_factor"):
        factors = getattr(scaling, name)
        if factors is not None and len(factors) != pairs:
            raise ValueError(f"{name}: expected head_dim / 2 = {pairs} numbers, got {len(factors)}")
    if scaling.rope_type == "dynamic" and pairs < 2:
        raise ValueError("rope_type 'dynamic': expected a head_dim of at least 4, got 2")
    if scaling.rope_type == "yarn" and config.rope_theta <= 1:
        raise ValueError(f"rope_type 'yarn': expected a rope_theta above 1, got {config.rope_theta!r}")
