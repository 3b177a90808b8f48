"""Configuration: YAML with includes and overrides becomes a validated, frozen, typed tree."""

from jaxdist.config.document import Document, KeyPath, Origin, dotted, value_at
from jaxdist.config.explain import Problem
from jaxdist.config.load import read
from jaxdist.config.schema import Config, Count, problems_error, validate
from jaxdist.config.show import (
    ResolvedValue,
    json_schema,
    plain_yaml,
    provenance,
    render_rows,
    resolved_yaml,
)

__all__ = [
    "Config",
    "Count",
    "Document",
    "KeyPath",
    "Origin",
    "Problem",
    "ResolvedValue",
    "dotted",
    "json_schema",
    "plain_yaml",
    "problems_error",
    "provenance",
    "read",
    "render_rows",
    "resolved_yaml",
    "validate",
    "value_at",
]
