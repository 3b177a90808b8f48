"""The hooks of a run: the work between its steps, and the user's own hooks."""
