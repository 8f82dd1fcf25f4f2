"""What lsjax is compared with, on the same weights: transformers in torch, and llama.cpp where it is installed."""

import functools
import importlib.util
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import lsjax
from lsjax.convert.names import GGUF
from lsjax.measure import time_in_turns
from lsjax.params import flatten


class Transformers:
    """A ``LlamaForCausalLM`` with its fastest attention and number of threads, found by trying.

    Args:
        directory: a checkpoint in Hugging Face layout.
        dtype: ``"float32"`` or ``"bfloat16"``.
    """

    name = "transformers"

    def __init__(self, directory: Path, dtype: str) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.eos_token_id = None
        most = torch.get_num_threads()
        choices = list(itertools.product(("sdpa", "eager"), sorted({1, most})))
        prompt = np.ones((1, 16), np.int32)

        def attempt(choice: tuple[str, int]) -> Callable[[], Any]:
            def call() -> Any:
                self._set(*choice)
                return self.generate(prompt, 8)

            return call

        timings = time_in_turns({choice: attempt(choice) for choice in choices}, repetitions=3)
        attention, threads = min(choices, key=lambda choice: timings[choice].median)
        self._set(attention, threads)
        self.setting = f"attention {attention}, {threads} threads, dynamic cache"

    def _set(self, attention: str, threads: int) -> None:
        self.model.set_attn_implementation(attention)
        self._torch.set_num_threads(threads)

    def generate(self, tokens: np.ndarray, new: int, exit_layer: int | None = None) -> np.ndarray:
        """Greedy text, never stopped by an EOS: int ``[batch, prompt + new]``."""
        ids = self._torch.tensor(tokens.astype(np.int64))
        drafts = {} if exit_layer is None else {"assistant_early_exit": exit_layer}
        with self._torch.no_grad():
            out = self.model.generate(
                ids,
                attention_mask=self._torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
                **drafts,
            )
        return out.numpy()


class LlamaCpp:
    """llama.cpp through llama-cpp-python, batch 1, with its fastest attention and number of threads, found by trying.

    Args:
        path: a GGUF file; :func:`save_gguf` writes one.
        dtype: ``"float32"``, whose cache is then float32 too, or another, with llama.cpp's own float16.
        slots: positions that the cache holds.
    """

    name = "llama.cpp"

    def __init__(self, path: Path, dtype: str, slots: int) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]

        cache = llama_cpp.GGML_TYPE_F32 if dtype == "float32" else llama_cpp.GGML_TYPE_F16

        def load(choice: tuple[bool, int], slots: int) -> Any:
            settings = {"flash_attn": choice[0], "n_threads": choice[1], "n_threads_batch": choice[1]}
            return llama_cpp.Llama(str(path), n_ctx=slots, type_k=cache, type_v=cache, verbose=False, **settings)

        prompt = np.ones((1, 16), np.int32)
        choices = list(itertools.product((False, True), sorted({1, os.cpu_count() or 1})))
        tried = {choice: load(choice, 64) for choice in choices}
        timings = time_in_turns(
            {choice: functools.partial(_llama_cpp_text, model, prompt, 8) for choice, model in tried.items()},
            repetitions=3,
        )
        flash, threads = min(choices, key=lambda choice: timings[choice].median)
        self._llama = load((flash, threads), slots)
        attention = "flash" if flash else "plain"
        self.setting = f"llama-cpp-python {llama_cpp.__version__}, attention {attention}, {threads} threads"

    def generate(self, tokens: np.ndarray, new: int) -> np.ndarray:
        """Greedy text of one row, never stopped by an EOS: int32 ``[1, prompt + new]``."""
        return _llama_cpp_text(self._llama, tokens, new)

    @staticmethod
    def is_installed() -> bool:
        """Whether llama-cpp-python and the package that writes its files are there."""
        return all(importlib.util.find_spec(name) is not None for name in ("llama_cpp", "gguf"))


def _llama_cpp_text(llama: Any, tokens: np.ndarray, new: int) -> np.ndarray:
    llama.reset()  # or it would keep what the last prompt shares with this one
    found = llama.generate(tokens[0].tolist(), temp=0.0)
    return np.concatenate([tokens[0], np.fromiter(itertools.islice(found, new), np.int32)])[None]


def save_gguf(params: lsjax.Params, path: Path) -> Path:
    """The same numbers for llama.cpp: matrices in their dtype, vectors in float32, no tokenizer.

    Raises:
        ValueError: scaled rotary positions, which are not written.
    """
    import gguf

    config = params.config
    if config.rope_scaling is not None:
        raise ValueError(f"rope_scaling: expected None for a GGUF file, got {config.rope_scaling}")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for leaf_path, leaf in flatten(params.tree).items():
        name, transform = GGUF.from_flax(leaf_path)
        array = np.asarray(leaf)
        if transform != "keep":
            array = array.T
        if transform in ("query rows", "key rows"):  # each head's rows for rotation in pairs
            rows = array.reshape(-1, 2, config.head_dim // 2, *array.shape[1:])
            array = rows.swapaxes(1, 2).reshape(array.shape)
        if array.ndim < 2 or array.dtype.itemsize != 2:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        else:
            kind = {"bfloat16": gguf.GGMLQuantizationType.BF16, "float16": gguf.GGMLQuantizationType.F16}
            stored = np.ascontiguousarray(array).view(np.uint8)
            writer.add_tensor(name, stored, raw_dtype=kind[array.dtype.name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_for_rivals(params: lsjax.Params, directory: Path) -> Path:
    """A checkpoint in Hugging Face layout, once: the same numbers for both sides."""
    if not (directory / "config.json").exists():
        lsjax.save(params, directory, to="hf")
    return directory
