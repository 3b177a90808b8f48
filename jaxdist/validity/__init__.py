"""Combinations of settings that are refused, and settings without effect."""
