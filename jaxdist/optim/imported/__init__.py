"""Imported optimizers, and the properties that jaxdist detects in them."""
