"""Proofs: whether a plan computes what one device would, by types, by numbers and by bytes."""
