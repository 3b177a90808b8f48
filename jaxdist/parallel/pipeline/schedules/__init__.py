"""Schedules as tables of tasks: what makes, checks, times, reads and writes them."""
