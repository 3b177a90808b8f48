"""Numbers of a run: written to disk, shown while it goes, drawn as a loss curve."""
