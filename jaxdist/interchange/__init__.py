"""Models of other frameworks' files: Hugging Face directories and GGUF files, in and out.

A family is a table (`families`) of tensors' names and layouts next to one of our models; a reader
(`safetensors`, `gguf`) maps files into memory; `leaves` cuts out of them what a device holds.
"""
