"""The agents that start the processes of a run, watch them, and restart them after a failure."""
