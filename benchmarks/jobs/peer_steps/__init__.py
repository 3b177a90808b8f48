"""The side of torch in `benchmarks.jobs.steps`; `__main__.py` is a program, not imported."""
