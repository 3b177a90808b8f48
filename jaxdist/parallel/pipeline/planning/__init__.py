"""The planning of a pipeline: the layers of each chunk, their costs, and the schedule."""
