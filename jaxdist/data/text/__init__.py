"""Text: documents, tokenizers, windows, and a baseline."""
