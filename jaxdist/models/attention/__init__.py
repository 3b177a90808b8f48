"""Kernels of causal attention: one contract, an alternative a file, and `choose`."""
