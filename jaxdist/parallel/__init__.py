"""The distribution of a train step over a mesh, with or without jaxdist's own communication."""
