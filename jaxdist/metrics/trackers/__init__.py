"""Trackers: services and databases that get a run's numbers beside its own files."""
