"""Sparse tables: servers that create, hold and update only the rows that batches look up."""
