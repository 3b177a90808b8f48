"""Sparse tables on servers: only the rows that batches look up are created and updated."""
