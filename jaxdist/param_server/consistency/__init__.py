"""Which changes are applied when, and who may read: one contract, and its alternatives."""
