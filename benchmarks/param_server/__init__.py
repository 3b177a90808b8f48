"""Parameter servers: the wire, what comes in at each server, and runs with a slow worker."""
