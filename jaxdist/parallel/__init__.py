"""The distribution of a step over a mesh: which axes jaxdist communicates on itself, and how."""
