"""The part of a model's parameters that is trained."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxdist.config.schema import Config

Pattern = Annotated[str, Field(min_length=1)]
"""A pattern for names of parameters, in which `*` matches any characters, `/` too."""


class PartConfig(Config):
    """The settings of every model that choose the parameters to train."""

    freeze: tuple[Pattern, ...] = ()
    """Patterns for names of parameters that are not trained, such as `blocks/*`: they have neither
    gradients nor optimizer state."""
