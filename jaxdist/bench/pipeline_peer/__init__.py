"""torch's side of `jaxdist.bench.pipeline_race`; `__main__.py` is a program, nobody imports it."""
