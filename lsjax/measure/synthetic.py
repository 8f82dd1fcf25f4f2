"""Random Llamas of any shape whose early exit agrees with the whole model as often as wanted.

They stand in for checkpoints that cannot be had, where mechanics are timed at a published acceptance: same shapes, same
bytes, same rounds, no meaning in the text. Whatever is measured with one must be called synthetic.

What keeps a random model's greedy text from falling into a short cycle:

- Queries and keys have the deviation 2, so that scores have 4: each head reads few tokens, wherever in the text they
  stand, and the next token hangs on all of the text instead of the last token and a mean over the rest.
- The embedding is small beside what the layers add, and the final norm's weight is -1: with a tied head a token does
  not name itself, but makes itself less likely.

What the layers after the exit add is multiplied by one number: at 0 they add nothing and every draft is accepted; the
larger it is, the more often they change the choice.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from lsjax.checks import check_depth, check_params
from lsjax.config import LlamaConfig, RopeScaling
from lsjax.convert import flax, huggingface
from lsjax.convert.directory import replacing
from lsjax.convert.writer import write_json
from lsjax.io import is_written
from lsjax.params import Model, Params, draw

_LLAMA_3: Any = {
    "vocab_size": 128256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 128000,
    "eos_token_id": (),  # texts of random tokens end where they are told to
}
SHAPES = {
    "llama-3.2-1b": LlamaConfig(
        **_LLAMA_3,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        rope_scaling=RopeScaling(
            rope_type="llama3",
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    ),
    "llama-3-8b": LlamaConfig(
        **_LLAMA_3,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        max_position_embeddings=8192,
    ),
}

_SCORES = 4.0  # deviation of attention's scores
_LOGITS = 2.0  # deviation of the logits, about that of trained models; embedding and head follow

AnyModel = TypeVar("AnyModel", bound=Model)


def agreeing_params(
    config: LlamaConfig, *, exit_layer: int, scale: float, key: jax.Array, dtype: Any = jnp.float32
) -> Params:
    """A random Llama whose early exit agrees with the whole model: the smaller the scale, the more often.

    The construction is that of this module; the same arguments give the same model (on another kind of device perhaps
    other last bits). :func:`lsjax.measure.calibrate` finds the scale of a wanted acceptance.

    Args:
        config: any shape; ``SHAPES`` has some of published models.
        exit_layer: layers that draft, 1..num_hidden_layers - 1.
        scale: what the attention and MLP outputs of the layers after the exit are multiplied by; 0: the exit always
            agrees. 1: all layers add alike.
        key: a JAX random key.
        dtype: the arrays' dtype.

    Raises:
        ValueError: no layer follows the exit, or a scale below 0.

    Example:
        >>> config = lsjax.measure.synthetic.SHAPES["llama-3.2-1b"]
        >>> params = lsjax.measure.agreeing_params(config, exit_layer=4, scale=0.1, key=jax.random.key(0))
    """

    def spread(path: str, shape: tuple[int, ...]) -> float:
        *_, module, kind = path.split("/")
        if kind == "embedding":
            return _LOGITS * config.hidden_size**-0.5
        gain = {"q_proj": _SCORES**0.5, "k_proj": _SCORES**0.5, "lm_head": _LOGITS}.get(module, 1.0)
        return gain * shape[0] ** -0.5

    params = draw(config, key, spread, dtype)
    params.tree["norm"]["scale"] *= -1
    return scale_deep_layers(params, exit_layer, scale)


def scale_deep_layers(params: AnyModel, exit_layer: int, scale: float) -> AnyModel:
    """The same model with what its layers after the exit add to the residual multiplied by ``scale``.

    All other arrays are shared with ``params``, which may be prepared for decoding (``lsjax.prepare``).

    Raises:
        ValueError: no layer follows the exit, or a scale below 0.
    """
    exit_layer = check_exit(params, exit_layer)
    if not 0 <= scale < math.inf:
        raise ValueError(f"scale: expected a number of at least 0, got {scale!r}")
    tree = dict(params.tree)
    for layer in range(exit_layer, params.config.num_hidden_layers):
        module = tree[f"layers_{layer}"]
        attention, mlp = module["self_attn"], module["mlp"]
        out, down = (jax.tree.map(lambda leaf: _times(leaf, scale), x) for x in (attention["o_proj"], mlp["down_proj"]))
        module = {**module, "self_attn": {**attention, "o_proj": out}, "mlp": {**mlp, "down_proj": down}}
        tree[f"layers_{layer}"] = module
    return type(params).tree_unflatten(params.config, (tree,))


@jax.jit
def _times(leaf: jax.Array, scale: float) -> jax.Array:
    return (leaf.astype(jnp.float32) * scale).astype(leaf.dtype)


def check_exit(params: Model, exit_layer: int) -> int:
    """``exit_layer`` as an int that leaves a layer to be scaled."""
    check_params(params)
    exit_layer = check_depth("exit_layer", exit_layer, params.config)
    if exit_layer == params.config.num_hidden_layers:
        raise ValueError(f"exit_layer: expected a layer before the last, {exit_layer}, for deep layers to be scaled")
    return exit_layer


def save_synthetic(params: Params, directory: str | os.PathLike[str], description: Mapping[str, Any]) -> None:
    """Writes a model in Hugging Face's layout, marked as synthetic: transformers and ``lsjax.load`` read it.

    ``config.json`` has an entry ``synthetic`` with the description, which both pass over, and a ``README.md`` says the
    same to people.

    Args:
        params: concrete parameters.
        directory: absent, empty, or written by lsjax (and then replaced).
        description: for JSON; whatever tells how the model was made and what was measured with it.

    Raises:
        FileExistsError: the path is a file, or a directory that holds something else.
        OSError: the directory cannot be written; what was there is there still.
    """
    with replacing(Path(directory).expanduser().resolve(), is_written) as new:
        details = json.dumps(dict(description), indent=2)
        (new / "README.md").write_text(_README.format(details=details), encoding="utf-8")
        flax.write(params, new, target=huggingface.TARGET)
        entries = json.loads((new / "config.json").read_bytes())
        write_json(new / "config.json", {**entries, "synthetic": dict(description)})


_README = """# A synthetic Llama

Random weights, made by `lsjax.measure.synthetic`. Its text means nothing. Its early exit agrees with the whole model
about as often as was asked for, so that the mechanics of self-speculative decoding can be timed at this acceptance.
Whatever is measured with it must be called synthetic.

```json
{details}
```
"""
