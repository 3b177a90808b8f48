"""Kernels of causal attention: a contract, a file for each kernel, and `choose`."""
