"""Studies, which compare many runs of one config in a table and a picture."""
