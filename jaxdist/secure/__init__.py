"""Secure aggregation: a server learns the sum of its clients' vectors, of which it sees none."""
