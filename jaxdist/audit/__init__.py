"""The audit: whether a config's settings reach the compiled program."""
