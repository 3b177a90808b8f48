"""What a run draws: meters behind one contract, and the joules, kWh and carbon of its lives."""
