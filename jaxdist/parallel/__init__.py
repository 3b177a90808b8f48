"""The distribution of a train step over a mesh, with collectives from jaxdist or from XLA."""
