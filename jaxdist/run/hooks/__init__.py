"""What a run does beside its steps: its own hooks, and those of its user."""
