"""What lsjax is compared with, on the same weights: transformers in torch, and llama.cpp where it is installed."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import lsjax
from lsjax.measure import time_in_turns


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
    """llama.cpp through llama-cpp-python, batch 1, on a GGUF file of the same weights."""

    name = "llama.cpp"

    def __init__(self, path: Path) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]

        self._llama = llama_cpp.Llama(str(path), n_ctx=4096, verbose=False, logits_all=False)
        self.setting = f"llama-cpp-python {llama_cpp.__version__}, its default threads"

    def generate(self, tokens: np.ndarray, new: int) -> np.ndarray:
        """Greedy text of one row, never stopped."""
        self._llama.reset()
        found = self._llama.generate(tokens[0].tolist(), temp=0.0, reset=True)
        return np.concatenate([tokens[0], np.fromiter(itertools.islice(found, new), np.int32)])[None]


def save_for_rivals(params: lsjax.Params, directory: Path) -> Path:
    """A checkpoint in Hugging Face layout, once: the same numbers for both sides."""
    if not (directory / "config.json").exists():
        lsjax.save(params, directory, to="hf")
    return directory
