"""The parameter servers of a run: their protocol, the transport of messages, and training.

The packages `consistency`, `protocol` and `placement` contain pure functions, which open no socket
and read no clock. The packages `live` and `jaxdist.wire` carry messages over threads, shared memory
and gRPC. The package `training` contains the workers and the supervisor of a run, and `processes`
contains the program of each process.
"""
