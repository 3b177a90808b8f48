"""The executor, which runs a schedule inside a compiled program."""
