"""A run: its directory and identity, its hooks, what it saves and loads, its report."""
