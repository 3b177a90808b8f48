"""How messages of workers and servers travel: one contract, over gRPC or within a process."""
