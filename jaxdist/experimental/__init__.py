"""Optimizers that few users need, under the same contracts as the core.

In the core only `jaxdist.experiment` imports this package, to list the alternatives of a config.
The settings and results of these optimizers may change from one minor version to the next.
"""
