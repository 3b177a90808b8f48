"""A run: its directory, its hooks, the states that it saves and loads, and its report."""
