"""What a computation costs, counted in what jax traces."""
