"""The construction of pipeline stages, their chunks and a train step from a model."""
