"""The command `python -m jaxdist.validity`, which prints the page of refused combinations."""

from jaxdist.validity.page import validity_page

print(validity_page(), end="")
