"""The bench `jaxdist bench elastic`, of runs that lose processes."""
