"""Pieces of ejected files for the optimizers and the learning rate."""
