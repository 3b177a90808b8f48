"""Trackers: services and databases that receive a run's numbers, in addition to the run's files."""
