"""The processes of a run: a server, a worker, a rack's aggregator, and a table server."""
