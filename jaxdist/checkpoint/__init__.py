"""Atomic checkpoints: saved in the background, verified before they are loaded."""
