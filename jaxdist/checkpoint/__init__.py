"""Atomic checkpoints, which are saved in the background and verified before they are loaded."""
