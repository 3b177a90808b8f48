"""The cost of a config, read from its compiled program."""
