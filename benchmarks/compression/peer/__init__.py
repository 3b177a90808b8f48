"""The side of torch in the lab of compression; `__main__.py` is a program that is not imported."""
