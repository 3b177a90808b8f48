"""The properties that jaxdist detects in optimizers that a user imports."""
