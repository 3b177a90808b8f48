"""Runs on clusters: one job, rendered for the engine that a cluster has."""
