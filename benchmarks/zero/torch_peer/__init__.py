"""The side of torch in `jaxdist bench zero`; `__main__.py` is a program, not imported."""
