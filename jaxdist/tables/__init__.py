"""Sparse tables on servers, which create and update only the rows that batches look up."""
