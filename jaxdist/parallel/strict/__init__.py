"""The parts of strict mode, which gives the same bits on any number of devices.

The gradients of logical shards are added up in a fixed order (`parallel.deterministic`).
"""
