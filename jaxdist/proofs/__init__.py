"""Proofs that a plan computes what a single device would: by types, by numbers and by bytes.

Types follow every value of the step's program, numbers compare training at a reduced size, and
bytes compare the communication of the compiled program with that of the code.
"""

from jaxdist.proofs.types.rules import rule

__all__ = ["rule"]
