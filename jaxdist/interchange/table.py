"""A YAML table of the tensors that fill a user's model, which is checked for every parameter.

The file has a single section:

    import:
      rename:                               # parameter: tensor; * is any text, equal in both names
        embed/kernel: embeddings.weight
        blocks/*/kernel: "encoder.{layer}.*.weight"
      transpose:                            # parameter: order of dims, or a layout
        blocks/*/kernel: [1, 0]
        blocks/attention/kernel: (H d) D -> D H d
      ignore: ["*.num_batches_tracked"]     # tensors that fill nothing
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import Field, field_validator

from jaxdist.config import Config, read, validate
from jaxdist.errors import ConfigError
from jaxdist.interchange.family import Row
from jaxdist.interchange.layouts import WeightLayout
from jaxdist.interchange.leaves import BUFFERS, Leaf, match
from jaxdist.interchange.tensors import Tensor
from jaxdist.models.functional import Functional
from jaxdist.trees import flatten_with_names
from jaxdist.types import PyTree


class Table(Config):
    """The tensors that fill a model's parameters, and their layouts."""

    rename: dict[str, str] = Field(default_factory=dict)
    """The tensor of each parameter, by patterns. In a pattern, `*` matches the same text in the
    names of the parameter and of the tensor, and {layer} is the number of a layer that the
    parameter stacks. The first pattern that matches applies. If no pattern matches a parameter, its
    tensor has the name of the parameter, with dots for slashes."""
    transpose: dict[str, str | tuple[int, ...]] = Field(default_factory=dict)
    """The order of a tensor's dims in the parameter, such as [1, 0], or a layout, by patterns of
    parameters. The first pattern that matches applies; without a match the order is unchanged."""
    ignore: tuple[str, ...] = ()
    """The patterns of the names of tensors that fill no parameter."""

    @field_validator("transpose")
    @classmethod
    def _check_layouts(cls, found: dict[str, str | tuple[int, ...]]) -> dict[str, object]:
        for name, how in found.items():
            if isinstance(how, str):
                WeightLayout(how)
            elif sorted(how) != list(range(len(how))):
                raise ValueError(
                    f"{name}: {list(how)} is not an order of the dims: list each dim once, counted "
                    "from 0, such as [1, 0]"
                )
        return dict(found)


class _File(Config):
    """The YAML file of a table."""

    import_: Table = Field(alias="import")
    """The table of names, of orders of dims, and of ignored tensors."""


def read_table(path: Path) -> Table:
    """Read the table of a YAML file.

    Raises:
      ConfigError: the file cannot be read, or does not hold a table.
    """
    return validate(read(path), _File).import_


def match_with(
    table: Table, model: Functional, tensors: Mapping[str, Tensor], *, where: str
) -> list[Leaf]:
    """Match a model's parameters and buffers with tensors, by a table.

    Args:
      where: the name of the files in error messages.

    Raises:
      ConfigError: a pattern matches nothing, an entry of `transpose` has another number of dims
        than its parameter, or `match` refuses the tensors.
    """
    shapes: PyTree = {**model.params, **({BUFFERS: model.buffers} if model.buffers else {})}
    names = {name: len(leaf.shape) for name, leaf in flatten_with_names(shapes)}
    _check_used([*table.rename, *table.transpose], names, "parameter")
    _check_used(table.ignore, tensors, "tensor")
    rows = {n: _row(table, n, size - (n in model.stacked)) for n, size in names.items()}
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not any(fnmatchcase(name, pattern) for pattern in table.ignore)
    }
    return match(shapes, model.stacked, {}, rows, kept, where=where)


def _check_used(patterns: Iterable[str], names: Iterable[str], what: str) -> None:
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            listed = ", ".join(known[:8]) + (" ..." if len(known) > 8 else "")
            raise ConfigError(f"import: {pattern!r} matches no {what}; choose from {listed}")


def _row(table: Table, name: str, ndim: int) -> Row:
    found = (renamed(name, *pair) for pair in table.rename.items())
    tensor = next((one for one in found if one is not None), name.replace("/", "."))
    pattern = next((p for p in table.transpose if fnmatchcase(name, p)), None)
    how = range(ndim) if pattern is None else table.transpose[pattern]
    if isinstance(how, str):
        return Row(tensor, how)
    if len(how) != ndim:
        raise ConfigError(
            f"import.transpose: {pattern!r} orders {len(how)} dims, but a tensor of {name} has "
            f"{ndim}: use a pattern that matches only parameters with {len(how)} dims, or put a "
            f"pattern for {name} first"
        )
    dims = [f"d{i}" for i in range(ndim)]
    return Row(tensor, f"{' '.join(dims)} -> {' '.join(dims[i] for i in how)}")


def renamed(name: str, pattern: str, tensor: str) -> str | None:
    """Return the name of a parameter's tensor, or None if the pattern does not match.

    Args:
      name: the name of the parameter.
      pattern, tensor: an entry of `rename`.

    >>> renamed("blocks/mlp/up", "blocks/*/*", "h.{layer}.*.*.weight")
    'h.{layer}.mlp.up.weight'
    """
    found = re.fullmatch("(.*?)".join(map(re.escape, pattern.split("*"))), name)
    if found is None:
        return None
    texts = iter(found.groups())
    return re.sub(r"\*", lambda _: next(texts, "*").replace("/", "."), tensor)
