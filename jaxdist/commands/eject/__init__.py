"""A config as one file of plain JAX, without jaxdist."""
