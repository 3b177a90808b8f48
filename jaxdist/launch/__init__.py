"""Launches on clusters: a job, rendered for the engine of a cluster."""
