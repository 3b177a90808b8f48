"""The runs of parameter servers: their processes, their files, and the computation of a worker."""
