"""Pieces of an ejected file: how a step lies on the devices, and the loop."""
