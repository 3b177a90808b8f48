"""Benchmarks of collectives: their traffic, their time, and a comparison with torch over gloo."""
