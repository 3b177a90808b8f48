"""Pipelines: splitting a model into stages, lowering a schedule to ticks, running one program."""
