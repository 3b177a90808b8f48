"""`jaxdist bench compression`."""
