"""Benches of runs that lose processes."""
