"""Timelines as text, pictures and traces."""
