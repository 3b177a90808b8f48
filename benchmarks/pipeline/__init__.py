"""Pipelines: memory, formulas, time, and beside torch."""
