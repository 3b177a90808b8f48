"""Proofs: whether a plan computes what one device would, by types, by numbers and by bytes."""

from jaxdist.proofs.types.rules import rule

__all__ = ["rule"]
