"""jaxdist: train any JAX model on any mesh by changing a config."""
