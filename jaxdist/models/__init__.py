"""Models: flax NNX modules that name logical dims only, and never a mesh axis."""
