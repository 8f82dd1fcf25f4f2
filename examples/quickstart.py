"""Plain decoding, then the same with early-exit drafts: the same text, and the time of both.

Run it as ``python examples/quickstart.py`` for SmolLM2-135M-Instruct, which is fetched once, or with a model that was
trained to exit early, ``python examples/quickstart.py facebook/layerskip-llama3.2-1B`` (gated, on the hub).
"""

import sys
import time

import numpy as np

import lsjax
from lsjax.text.tokenizer import load_tokenizer

prompt = "Alice and Bob"
checkpoint = sys.argv[1] if len(sys.argv) > 1 else "demo"

tokenizer = load_tokenizer(checkpoint)
tokens = np.array(tokenizer(prompt).input_ids)
params = lsjax.load(checkpoint)


def run(**options):
    """Tokens and seconds of a second run; the first one compiles."""
    lsjax.generate(params, tokens, max_new_tokens=20, **options)  # warm-up
    start = time.perf_counter()
    out = lsjax.generate(params, tokens, max_new_tokens=20, **options)
    written = np.asarray(out.tokens)[: int(out.lengths)]
    return out, written, time.perf_counter() - start


_, plain, seconds = run()
print(f"Plain:      {seconds:.3f} s")
print(f"            {tokenizer.decode(plain)!r}")

out, early_exit, seconds = run(exit_layer=4)
print(f"Early exit: {seconds:.3f} s, {float(out.stats.acceptance_rate):.0%} of the drafts accepted")
print(f"            {tokenizer.decode(early_exit)!r}")

print("Same text:", bool(np.array_equal(plain, early_exit)))
