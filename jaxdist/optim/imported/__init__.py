"""Imported optimizers: what jaxdist has to find out about them."""
