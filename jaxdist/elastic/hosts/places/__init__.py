"""Places where hosts meet: a directory, a Redis server."""
