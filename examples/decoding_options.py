"""Every decoding option with drafts and without: the same text, or, where tokens are drawn, the same distribution.

``python examples/decoding_options.py [MODEL] [EXIT_LAYER]``; the demo model (fetched once) and layer 10 by default.
"""

import sys

import jax
import numpy as np

import lsjax
from lsjax import processors
from lsjax.text.tokenizer import load_tokenizer

model = sys.argv[1] if len(sys.argv) > 1 else "demo"
exit_layer = int(sys.argv[2]) if len(sys.argv) > 2 else 10
tokenizer = load_tokenizer(model)
params = lsjax.prepare(lsjax.load(model))
tokens = np.array(tokenizer("The tide rises because").input_ids)


def run(**options):
    return lsjax.generate(params, tokens, max_new_tokens=24, eos_token_id=(), **options)


def text(out):
    return repr(tokenizer.decode(np.asarray(out.tokens)[len(tokens) : int(out.lengths)]))


def show(title, **options):
    """A text written plainly and with drafts: greedily they must be equal."""
    plain, drafted = run(**options), run(exit_layer=exit_layer, **options)
    assert "key" in options or text(plain) == text(drafted)
    print(f"{title}\n  {text(drafted)}\n  {int(drafted.stats.accepted)} of {int(drafted.stats.drafted)} drafts kept")
    return drafted


plain = show("greedy")
show(
    "a repetition penalty, and no three tokens twice",
    processors=[processors.RepetitionPenalty(1.2), processors.NoRepeatNgram(3)],
)


def lower_case(logits, tokens, lengths):
    """A processor of one's own: any function of the logits and the text so far."""
    return jax.numpy.where(capitals, -jax.numpy.inf, logits)


words = tokenizer.batch_decode(np.arange(params.config.vocab_size)[:, None])
capitals = np.array([word != word.lower() for word in words])
show("lower case only", processors=lower_case)

stop = np.asarray(plain.tokens)[len(tokens) + 6 : len(tokens) + 8].tolist()
show(f"until the ids {stop} follow each other", stop_sequences=[stop])

key = jax.random.key(0)
show("drawn", key=key, temperature=0.8, top_p=0.9)
show("drafts only while the exit is sure", confidence_threshold=0.5)
show("2 drafts more after a round that kept all, else 1 less", num_speculations_schedule="heuristic")

out = run(exit_layer=exit_layer, top_n=2)
scores = out.scores
assert scores is not None
assert scores.top_tokens is not None
print("log-probabilities under the whole model, and the two most probable tokens")
for column in range(len(tokens), len(tokens) + 4):
    best = [words[token] for token in scores.top_tokens[column]]
    print(f"  {words[out.tokens[column]]!r}: {float(scores.log_probs[column]):.3f}, {best}")
