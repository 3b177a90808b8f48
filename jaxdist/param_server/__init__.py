"""Parameter servers: the protocol between workers and servers, its transport, and training with it.

`consistency`, `protocol` and `placement` are pure: they open no socket and read no clock. `wire`
and `live` carry messages over threads, shared memory and gRPC. `training` has the workers and
the supervisor of a run, and `processes` the program of each process.
"""
