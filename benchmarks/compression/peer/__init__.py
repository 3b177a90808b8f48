"""torch's side of the lab of compression; `__main__.py` is a program, nobody imports it."""
