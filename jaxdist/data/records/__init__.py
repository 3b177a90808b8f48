"""Examples in files of other frameworks: Hugging Face datasets, and ArrayRecord files."""
