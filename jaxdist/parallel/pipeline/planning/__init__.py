"""Which layers make a chunk, what they cost, and which schedule runs them."""
