"""The cost of a computation, counted in its jaxpr."""
