"""Functions that load states: the first state of a run, and parts of another run's state."""
