"""How a run is made of steps and processes: one contract, and its alternatives."""
