"""The construction of chunks, pipeline stages and a train step from a model."""
