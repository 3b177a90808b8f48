"""Optimizers and learning-rate schedules, built from config."""
