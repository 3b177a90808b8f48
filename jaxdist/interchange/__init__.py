"""Models of other frameworks' files: Hugging Face directories and GGUF files, in and out.

A family is a table (`families`) that matches names and layouts of tensors with one of our models; a
reader (`safetensors`, `gguf_files`) maps files into memory; `leaves` cuts out of the mapped files
the shards that a device holds.
"""
