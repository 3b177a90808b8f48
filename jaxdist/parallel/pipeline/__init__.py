"""Pipelines: split a model into stages, lower a schedule to ticks, and run them in one program."""
