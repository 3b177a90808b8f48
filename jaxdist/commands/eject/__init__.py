"""Ejection of a config: its training as one file of plain JAX, without jaxdist."""
