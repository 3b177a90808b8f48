"""What a run prints: at its beginning, at its end, and afterwards."""
