"""Print the page of refused combinations."""

from jaxdist.validity.page import markdown

print(markdown(), end="")
