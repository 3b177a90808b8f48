"""`jaxdist simulate`: a config with a parameter server in virtual time."""
