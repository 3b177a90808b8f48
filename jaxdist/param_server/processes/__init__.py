"""The processes of a run with parameter servers: a server, a worker, a rack's aggregator."""
