"""The algorithms of collectives, each a `contract.Algorithm`, and the union for configs."""
