"""Parameter servers: what they agree on, how they talk, and how they train.

`consistency`, `protocol` and `placement` are pure: they open no socket and read no clock. `wire`
and `live` carry them over threads, shared memory and gRPC; `training` has a run's workers and its
supervisor, and `processes` what each of its processes does.
"""
