"""Numbers of a run: written to disk, displayed during the run, drawn as a loss curve."""
