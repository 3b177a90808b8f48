"""Images: their formats and splits."""
