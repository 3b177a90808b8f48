"""Pipelines: a model is split into stages, and a schedule is lowered to ticks of one program."""
