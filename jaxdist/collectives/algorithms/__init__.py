"""The algorithms of collectives, each one a `contract.Algorithm`, and which of them a config
names."""
