"""Reading and writing checkpoints: one table of names, one module for each format, one assembler.

``names`` says what each tensor of a format is called in Flax and how its layout differs; ``huggingface``, ``flax`` and
``gguf`` list a checkpoint's tensors from its headers; ``assemble`` checks the whole list, then reads tensor by tensor.
"""
