"""How one step is spread over a mesh: which axes jaxdist communicates on itself, and how."""
