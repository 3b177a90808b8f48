"""Labelled images: their file formats, and their training and held-out splits."""
