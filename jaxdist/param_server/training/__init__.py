"""Runs with a parameter server: its processes, their files, and what a worker computes."""
