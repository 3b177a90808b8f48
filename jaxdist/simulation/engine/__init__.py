"""A parameter server in virtual time: real gradients; speeds, links and faults from a config."""
