"""The planning of a pipeline: the costs of the layers, and the number of layers of each chunk."""
