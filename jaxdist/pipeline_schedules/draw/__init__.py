"""Time lines as text, pictures and traces."""
