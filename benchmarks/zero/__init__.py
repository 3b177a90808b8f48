"""ZeRO: bytes, memory, the published table, and beside torch."""
