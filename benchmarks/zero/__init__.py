"""The bench `jaxdist bench zero`: bytes, memory, the paper's figure, and a race against torch."""
