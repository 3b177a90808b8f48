"""The models for images, whose configs share the method `build(rngs, shape=, classes=, hint=)`."""
