"""The construction of stages, chunks and a step from a model."""
