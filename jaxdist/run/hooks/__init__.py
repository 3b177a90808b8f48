"""The work of a run besides its steps: its own hooks, and those of its user."""
