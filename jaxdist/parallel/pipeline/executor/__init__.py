"""The executor, which runs a pipeline schedule inside a compiled program."""
