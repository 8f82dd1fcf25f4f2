"""Reading and writing checkpoints: one table of names, one module for each format, one assembler.

``names`` says what each tensor of a format is called in Flax and how its layout differs. ``formats`` opens a
checkpoint: ``huggingface``, ``pytorch``, ``flax`` and ``gguf`` describe it from its headers (``checkpoint``). ``plan``
checks all of that against the model; ``inspection`` reports it. Tensor by tensor, ``assemble`` then fills parameters,
or ``rewrite`` writes another format through ``writer``, into a ``directory`` that appears whole or not at all.
"""
