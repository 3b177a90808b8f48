"""Pieces of an ejected file: the optimizer's update, and the learning rate."""
