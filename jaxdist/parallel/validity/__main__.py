"""Prints the page."""

from jaxdist.parallel.validity.page import markdown

print(markdown(), end="")
