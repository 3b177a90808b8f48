"""The cost of a config's train step, which is read from the compiled program."""
