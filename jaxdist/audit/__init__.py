"""Whether a config's settings reach the compiled program."""
