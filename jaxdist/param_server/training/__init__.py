"""Runs with parameter servers: their processes, their files, and the computation of a worker."""
