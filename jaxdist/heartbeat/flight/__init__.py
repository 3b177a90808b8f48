"""Flight records: what the processes of a generation did before it failed, and which were slow."""
