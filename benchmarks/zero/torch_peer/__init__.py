"""torch's side of `jaxdist bench zero`; `__main__.py` is a program, which nothing imports."""
