"""The training step, the loop that runs steps, and the plan of a run."""
