"""The reports of a run: at its start, at its end, and afterwards."""
