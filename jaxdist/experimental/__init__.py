"""Optimizers that few users need, with the same interfaces as the optimizers of the core.

In the core only `jaxdist.experiment` imports this package, to list the alternatives of a config.
The settings and results of these optimizers may change in any minor version.
"""
