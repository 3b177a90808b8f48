"""Models for images: they share a contract, `build(rngs, shape=, classes=, hint=)`."""
