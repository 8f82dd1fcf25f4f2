"""Text as it is written: accepted drafts in green, the model's own tokens in magenta.

Run it as ``python examples/streaming.py`` for SmolLM2-135M-Instruct, which is fetched once, or with a model and an exit
that it was trained for, ``python examples/streaming.py facebook/layerskip-llama3.2-1B 4`` (gated, on the hub).
"""

import sys

import lsjax

checkpoint = sys.argv[1] if len(sys.argv) > 1 else "demo"
exit_layer = int(sys.argv[2]) if len(sys.argv) > 2 else 29
generator = lsjax.TextGenerator.from_pretrained(checkpoint)

# A text, piece by piece. It ends before a blank line, wherever in a token or between rounds that falls.
answer = generator.stream("Why is the sky blue?", chat=True, stop="\n\n", exit_layer=exit_layer, max_new_tokens=48)
for piece in answer:
    for text, drafted in piece.runs:
        print(f"\033[{32 if drafted else 35}m{text}\033[0m", end="", flush=True)
stats = answer.result.stats
print(f"\n{answer.result.finish_reason}: {len(answer.result.tokens)} tokens in {stats.rounds} rounds")

# The same one level below, in tokens, a batch at a time: each block is what one round committed. The first row is ended
# from outside once it is 12 tokens long.
prompts = generator.tokenizer(["One, two, three,", "Monday, Tuesday,"], return_tensors="np", padding=True)
stream = lsjax.stream(
    generator.params,
    prompts["input_ids"],
    attention_mask=prompts["attention_mask"],
    exit_layer=exit_layer,
    max_new_tokens=48,
)
lengths = [0, 0]
for block in stream:
    lengths = [length + int(count) for length, count in zip(lengths, block.counts, strict=True)]
    print(" | ".join(f"{generator.tokenizer.decode(block.row(row))!r:40}" for row in range(2)))
    if lengths[0] >= 12:
        stream.stop(0)
print(f"new tokens: {lengths}; the state goes on at {stream.state.lengths.tolist()}")
