"""The consistency models, which decide when changes are applied and which versions may be read."""
