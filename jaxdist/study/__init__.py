"""Studies, each of which compares many runs of a single config in a table and a picture."""
