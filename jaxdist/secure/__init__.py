"""Secure aggregation: a server learns the sum of its clients' vectors, but no single vector."""
