"""A run, or several beside one another, as one self-contained HTML page."""
