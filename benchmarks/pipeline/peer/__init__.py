"""The side of torch in `benchmarks.pipeline.race`; `__main__.py` is a program, not imported."""
