"""Optimizers and learning-rate schedules, which are built from a config."""
