"""Text: tokenizers, prompts and chats, text while it is written, stop strings."""
