"""The replication of parameter ranges: if a server fails, a server with a copy takes over."""
