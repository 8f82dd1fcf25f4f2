"""Text: tokenizers."""
