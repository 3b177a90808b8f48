"""Benches of recommenders, whose tables are on servers and whose dense layers are not."""
