"""The import and export of models: Hugging Face directories and GGUF files.

A family (`families`) is a table that matches the names and layouts of tensors with one of jaxdist's
models. A reader (`safetensors`, `gguf_files`) maps files into memory. The module `leaves` reads the
shards of a device from the mapped files.
"""
