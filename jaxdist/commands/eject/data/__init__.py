"""Pieces of an ejected file: its examples, and the order in which it takes them."""
