"""A griffe extension for mkdocstrings that shows the doctests of docstrings as code.

Markdown would read the `>>>` of a doctest as quotations, and printed lists as links.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"^([ ]*)>>> .*\n?(?:^\1.*\S.*\n?)*", re.MULTILINE)


def fenced(text: str) -> str:
    """Put a fence around each doctest of a docstring.

    >>> fenced("Sum.\\n\\n>>> 1 + 1\\n2\\n").splitlines()
    ['Sum.', '', '```pycon', '>>> 1 + 1', '2', '```']
    """

    def fence(found: re.Match[str]) -> str:
        return f"{found[1]}```pycon\n{found[0].rstrip()}\n{found[1]}```\n"

    return DOCTEST.sub(fence, text)


class Doctests(Extension):
    """The extension that fences the doctests of all docstrings."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Fence the doctests of a module, class, function or attribute; griffe calls this."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
