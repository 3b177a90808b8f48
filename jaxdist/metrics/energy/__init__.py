"""The energy of a run: meters behind a common contract, and joules, kWh and carbon of its lives."""
