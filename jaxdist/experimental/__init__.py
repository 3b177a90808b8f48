"""Capabilities that few users need, under the same contracts as the core.

Nothing in the core imports them but `jaxdist.experiment`, where a config's alternatives are listed.
Their settings and results may change from one minor version to the next.
"""
