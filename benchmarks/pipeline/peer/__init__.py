"""torch's side of `benchmarks.pipeline.race`; `__main__.py` is a program, nobody imports it."""
