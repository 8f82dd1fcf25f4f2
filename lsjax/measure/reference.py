"""What the parity checks compare with: transformers' Llama in torch. Only this module imports torch, and lazily."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lsjax.config import LlamaConfig

# Parts of a layer by transformers' names; "" is the whole layer.
LAYER_PARTS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp",
    "",
)
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


@dataclasses.dataclass(frozen=True)
class Seen:
    """One call of a module inside a forward pass of torch, as NumPy arrays.

    Attributes:
        part: the module's name, without its layer's.
        layer: the layer, from 0, or None outside the layers.
        given: what the module read: hidden states ``[batch, length, width]``; ids for the embedding; int
            ``[1, length]`` positions for the rotary embedding.
        angles: the rotary cosines and sines that an attention or a layer was given.
        output: what it returned: one array, or cosines and sines.
    """

    part: str
    layer: int | None
    given: np.ndarray
    angles: tuple[np.ndarray, ...] | None
    output: tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Reference:
    """A ``LlamaForCausalLM`` of transformers in float32 on the CPU; everything in and out is NumPy."""

    model: Any

    def logits(self, tokens: np.ndarray, num_layers: int | None = None) -> np.ndarray:
        """Teacher-forced logits float32 ``[batch, length, vocab]`` of the model cut off after ``num_layers``."""
        with _torch().no_grad(), self._cut(num_layers):
            return self._run(tokens).logits.numpy()

    def observe(self, tokens: np.ndarray, see: Callable[[Seen], None]) -> None:
        """Runs the model once over ``[batch, length]`` and shows each module's input and output as it goes."""
        inner = self.model.model
        modules = [("embed_tokens", None, inner.embed_tokens), ("rotary_emb", None, inner.rotary_emb)]
        for index, layer in enumerate(inner.layers):
            modules += [(part, index, layer.get_submodule(part)) for part in LAYER_PARTS]
        modules += [("norm", None, inner.norm), ("lm_head", None, self.model.lm_head)]
        with contextlib.ExitStack() as stack:
            for part, index, module in modules:
                stack.enter_context(module.register_forward_hook(_hook(part, index, see), with_kwargs=True))
            with _torch().no_grad():
                self._run(tokens)

    def generate(self, prompt: Sequence[int], max_new_tokens: int, eos_token_ids: Sequence[int]) -> list[int]:
        """The prompt and transformers' greedy continuation, an EOS kept; nothing of ``generation_config`` applies."""
        import transformers

        torch, tokens = _torch(), _torch().tensor([list(prompt)])
        kept, self.model.generation_config = self.model.generation_config, transformers.GenerationConfig()
        try:
            with torch.no_grad():
                out = self.model.generate(
                    tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    eos_token_id=list(eos_token_ids) or None,
                    pad_token_id=0,
                )
        finally:
            self.model.generation_config = kept
        return out[0].tolist()

    def _run(self, tokens: np.ndarray) -> Any:
        return self.model(_torch().tensor(np.asarray(tokens), dtype=_torch().long), use_cache=False)

    @contextlib.contextmanager
    def _cut(self, num_layers: int | None) -> Iterator[None]:
        """The model without its later layers, for as long as the context lasts."""
        inner, config = self.model.model, self.model.config
        layers, count = inner.layers, config.num_hidden_layers
        try:
            inner.layers, config.num_hidden_layers = layers[:num_layers], num_layers or count
            yield
        finally:
            inner.layers, config.num_hidden_layers = layers, count


def load_reference(path: Path) -> Reference:
    """transformers' own reading of a directory in Hugging Face layout or of a ``.gguf`` file, in float32."""
    torch = _torch()
    from transformers import AutoModelForCausalLM

    with _no_bar():
        if path.is_file():
            model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        else:
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return Reference(model.eval())


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    """Without transformers' own progress bar, which it shows even where there is no terminal."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def as_reference(model: Any, config: LlamaConfig) -> Reference:
    """A torch model of the caller's, checked: a Llama of these sizes, float32, on the CPU, not training.

    Raises:
        TypeError: it is no ``LlamaForCausalLM``.
        ValueError: it is another model, elsewhere, in another dtype, or in training mode.
    """
    _torch()
    from transformers import LlamaForCausalLM

    if not isinstance(model, LlamaForCausalLM):
        raise TypeError(f"reference: expected a LlamaForCausalLM of transformers, got {type(model).__name__}")
    for name in _SIZES:
        ours, theirs = getattr(config, name), getattr(model.config, name)
        if ours != theirs:
            raise ValueError(f"reference: expected {name} {ours}, as params have it, got {theirs}")
    found = {f"{weight.dtype} on {weight.device}".removeprefix("torch.") for weight in model.parameters()}
    if found != {"float32 on cpu"}:
        raise ValueError(f"reference: expected float32 on cpu (.float().cpu()), got {', '.join(sorted(found))}")
    if model.training and model.config.attention_dropout:
        raise ValueError("reference: expected a model in evaluation mode (.eval()), got one that drops out")
    return Reference(model)


def _hook(part: str, layer: int | None, see: Callable[[Seen], None]) -> Callable[..., None]:
    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if part == "rotary_emb":
            given, output = kwargs["position_ids"] if "position_ids" in kwargs else args[1], tuple(output)
        else:
            given = args[0] if args else kwargs["hidden_states"]
            output = (output[0] if isinstance(output, tuple) else output,)  # attention returns its weights too
        angles = kwargs.get("position_embeddings")
        see(
            Seen(
                part,
                layer,
                given.numpy(),
                None if angles is None else tuple(angle.numpy() for angle in angles),
                tuple(array.numpy() for array in output),
            )
        )

    return hook


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"parity compares with transformers' model in torch, and that cannot be imported ({error}): "
            "install lsjax with its extra 'torch'"
        ) from error
    return torch
