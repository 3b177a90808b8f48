"""The division of a run into steps and processes: a contract and its alternatives."""
