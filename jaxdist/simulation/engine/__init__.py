"""Parameter servers in virtual time, with real gradients and with simulated links and faults."""
