"""Prints the page."""

from jaxdist.validity.page import markdown

print(markdown(), end="")
