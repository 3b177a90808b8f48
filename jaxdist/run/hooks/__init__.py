"""The hooks of a run: the tasks between its steps, and the user's own hooks."""
