"""Studies: many runs of one config, compared in a table and a picture."""
