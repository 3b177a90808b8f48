"""Assignment of parts of parameters to servers."""
