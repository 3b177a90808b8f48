"""A parameter server in virtual time: real gradients, scripted speeds, links and faults."""
