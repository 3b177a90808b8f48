"""Pipelines: schedules as tables, what checks, times and draws them, and what runs them."""
