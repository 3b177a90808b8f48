"""The check of a recorded run of parameter servers: its steps are computed again."""
