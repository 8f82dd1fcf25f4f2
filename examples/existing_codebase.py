"""lsjax inside a JAX codebase of one's own: its plain Flax tree, its optax step, its ``jit``.

The codebase keeps ``variables = {"params": ...}`` and knows nothing of lsjax but its names of arrays. A small Llama
learns to count on; after some steps one jitted function lets it write with early-exit drafts and scores what it wrote.

Run it as ``python examples/existing_codebase.py``; it needs no download.
"""

import jax
import jax.numpy as jnp
import optax

import lsjax
from lsjax.model.llama import Llama

config = lsjax.LlamaConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
    eos_token_id=(),
)
optimizer = optax.adam(3e-3)
variables = Llama(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
moments = optimizer.init(variables)


def counting(key, rows=16, length=24):
    """Rows that count up from anywhere, modulo the vocabulary, in steps of 1 to 3."""
    first, step = jax.random.randint(key, (2, rows, 1), 0, config.vocab_size)
    return (first + (1 + step % 3) * jnp.arange(length)) % config.vocab_size


@jax.jit
def train(variables, moments, key):
    """One optax step of the codebase, with the plain Flax module."""
    tokens = counting(key)

    def loss(variables):
        logits = Llama(config).apply(variables, tokens[:, :-1])[0]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])[:, 4:].mean()

    value, gradients = jax.value_and_grad(loss)(variables)
    updates, moments = optimizer.update(gradients, moments)
    return optax.apply_updates(variables, updates), moments, value


@jax.jit
def evaluate(variables, key):
    """The codebase's own jit: the raw tree becomes ``Params`` inside it, at no cost."""
    params = lsjax.Params(config, variables["params"])
    text = counting(key, length=24)
    out = lsjax.generate(params, text[:, :8], exit_layer=2, num_speculations=3, max_new_tokens=16)
    logits = lsjax.forward(params, out.tokens)[:, 7:-1]
    score = -optax.softmax_cross_entropy_with_integer_labels(logits, out.tokens[:, 8:]).mean(axis=-1)
    return out, (out.tokens == text)[:, 8:].mean(), score


def report(step, variables, value):
    """Prints how well the model counts, and how many of its drafts are accepted."""
    out, right, score = evaluate(variables, jax.random.key(1000))
    accepted = out.stats.accepted.sum() / out.stats.drafted.sum()
    print(
        f"step {step:3}: loss {value:.3f}, {right:.0%} of the tokens right, log-probability {score.mean():.2f}, "
        f"{accepted:.0%} of the drafts accepted, {out.stats.tokens_per_round.mean():.2f} tokens a round"
    )


for step in range(101):
    variables, moments, value = train(variables, moments, jax.random.key(step))
    if step in (0, 20, 100):
        report(step, variables, value)
print("one row:", evaluate(variables, jax.random.key(1000))[0].tokens[0].tolist())
