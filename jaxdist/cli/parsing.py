"""The classes of commands and groups, which read the help of options from docstrings."""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_ENTRY = re.compile(r"^  (\w+): (.*(?:\n    .*)*)", re.MULTILINE)


class DocumentedCommand(TyperCommand):
    """A command whose parameters are documented by the docstring of its function.

    The entry of a parameter under `Args:` is the help of the parameter. A switch that is off by
    default has no opposite `--no-NAME`.
    """

    def __init__(
        self, name: str | None, *, help: str | None = None, params: Any = None, **settings: Any
    ) -> None:
        text, _, entries = (help or "").partition("\n\nArgs:\n")
        texts = {entry: " ".join(words.split()) for entry, words in _ENTRY.findall(entries)}
        for param in params or ():
            param.help = texts.get(param.name, param.help)
            if param.default is False:
                param.secondary_opts = []
        # Typer keeps the line breaks of the source, which do not fit the width of the terminal.
        text = re.sub(r"(?<=\S)\n(?=\S)", " ", text)
        super().__init__(name, help=text, params=params, **settings)


class GroupWithDefault(TyperGroup):
    """A group of commands, whose first command is the default command."""

    @property
    def default(self) -> str:
        """The name of the default command."""
        return next(iter(self.commands))

    # The class of the context that typer passes has no public name; the public class that is named
    # here is narrower.
    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse the arguments, and insert the default command if they do not begin with a command.

        Return the arguments that the base class has not parsed.
        """
        if args and args[0] not in {*self.commands, *ctx.help_option_names}:
            args = [self.default, *args]
        return super().parse_args(ctx, args)
