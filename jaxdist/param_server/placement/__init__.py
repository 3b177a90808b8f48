"""The assignment of parts of parameters to servers."""
