"""A run: its directory, its hooks, its report, and the states that it saves and loads."""
