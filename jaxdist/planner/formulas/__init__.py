"""Formulas of the search: for a decoder, whose layers are known, or for other models, traced."""
