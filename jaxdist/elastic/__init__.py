"""Failures, and what is done about them: decisions and forecasts, functions of plain data."""
