"""A griffe extension for mkdocstrings: doctests of docstrings are shown as code.

Markdown takes the `>>>` of a doctest for quotations, and the lists that it prints for links.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"^([ ]*)>>> .*\n?(?:^\1.*\S.*\n?)*", re.MULTILINE)


def fenced(text: str) -> str:
    """A docstring with a fence around each doctest.

    >>> fenced("Sum.\\n\\n>>> 1 + 1\\n2\\n").splitlines()
    ['Sum.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """

    def fence(found: re.Match[str]) -> str:
        return f"{found[1]}```pycon\n{found[0].rstrip()}\n{found[1]}```\n"

    return DOCTEST.sub(fence, text)


class Doctests(Extension):
    """Puts the fences in."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
