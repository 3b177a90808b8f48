"""Planning: the layers of each chunk, their costs, and the schedule."""
