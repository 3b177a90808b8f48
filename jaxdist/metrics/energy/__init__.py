"""The energy of a run: meters with a common contract, and joules, kWh and carbon of attempts."""
