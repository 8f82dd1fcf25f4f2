"""Does my Llama compute the same in lsjax as in torch? Its modules, logits at some depths, and greedy text.

Run it as ``python examples/parity_check.py`` for a small random model, or with your own checkpoint, a directory in
Hugging Face layout: ``python examples/parity_check.py ./checkpoint``. Needs torch (the extra ``torch``).
"""

import sys
import tempfile

import torch
import transformers

import lsjax


def random_checkpoint(directory: str) -> str:
    """A stand-in for a model that you trained in torch."""
    config = transformers.LlamaConfig(
        vocab_size=200,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    return directory


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as scratch:
    checkpoint = sys.argv[1] if len(sys.argv) > 1 else random_checkpoint(scratch)
    torch_model = transformers.LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    params = lsjax.load(checkpoint, dtype="float32")

tokens = torch.randint(torch_model.config.vocab_size, (4, 24))  # or your own: tokenizer(text)["input_ids"]
report = lsjax.measure.parity(params, torch_model, tokens=tokens.numpy())
print(report)
report.assert_close()  # in a test: fails with the table
