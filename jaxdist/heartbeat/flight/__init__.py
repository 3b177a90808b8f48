"""Flight records: the last phases of each process before a failure, and the slow processes."""
