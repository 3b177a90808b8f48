"""The algorithms of collectives: subclasses of `contract.Algorithm`, and their type in configs."""
