"""The algorithms of collectives, each a `contract.Algorithm`, and their union type for configs."""
