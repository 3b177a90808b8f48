"""Comparing replicas between steps, and going back where they differ."""
