"""Pieces of an ejected file: the model with its initial parameters, and the loss."""
