"""The pages of the documentation that are printed from recorded results."""
