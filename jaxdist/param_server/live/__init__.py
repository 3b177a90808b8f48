"""Running servers and workers: threads, clocks and arrays around the protocol."""
