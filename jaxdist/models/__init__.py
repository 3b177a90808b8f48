"""The models: flax NNX modules that name logical dims, but never a mesh axis."""
