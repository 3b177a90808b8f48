"""The energy of a run: meters with a common contract, and each attempt's joules and carbon."""
