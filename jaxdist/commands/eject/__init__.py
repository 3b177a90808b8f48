"""The ejection of a config, which writes its training as a file of plain JAX, without jaxdist."""
