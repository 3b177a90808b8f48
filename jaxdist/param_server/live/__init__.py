"""The servers and clients of a run, which add threads, clocks and arrays to the protocol."""
