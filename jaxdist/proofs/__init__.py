"""Proofs that a plan computes what a single device would: by types, by numbers and by bytes.

The part `types` describes how the devices hold each value of the step's program. `numbers` compares
training with the plan and training on a single device, both for a smaller model. `bytes` compares
the communication of the compiled program with the communication for which the code asks.
"""

from jaxdist.proofs.types.rules import rule

__all__ = ["rule"]
