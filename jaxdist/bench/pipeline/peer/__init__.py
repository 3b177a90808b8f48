"""torch's side of `jaxdist.bench.pipeline.race`; `__main__.py` is a program, nobody imports it."""
