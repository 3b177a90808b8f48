"""Flight records, with the last phases of each process before a failure, and slow processes."""
