"""From a model to stages, chunks and a step."""
