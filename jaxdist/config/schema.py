"""The base of every component's configuration class."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """A frozen section of the configuration: unknown keys are refused, types are not coerced.

    Each field carries a sentence (its description) and, unless it is required, a default. A choice
    between sections is a union tagged by a literal field `type`.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
