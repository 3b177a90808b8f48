"""The rendezvous at which hosts exchange values: a directory, or a Redis server."""
