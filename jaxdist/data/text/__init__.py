"""Text: documents, tokenizers, windows of tokens, and a baseline model."""
