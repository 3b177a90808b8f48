"""Layouts, the order of a tensor's elements in a file and in a parameter: `(H d) D -> D H d`.

The left side has the dims of the file's tensor, and the right side has the dims of the parameter.
Parentheses join several dims into one. A number is a dim of that size, and `i=16` is a dim of size
16 with the name i. If a number is only on the left side, the parameter is the slice of the tensor
at the index `part` of that dim: `D (3 H d) -> D H d` reads queries, keys or values from a tensor of
all three.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxdist.errors import ConfigError

Side = tuple[tuple[str, ...], ...]
"""The dims of an array; each dim is the tuple of the names of the dims that it joins."""


def _parsed(text: str) -> Side:
    """Parse one side of a layout.

    >>> _parsed("(H d) D")
    (('H', 'd'), ('D',))
    """
    parts = re.findall(r"\(([^()]*[^()\s][^()]*)\)|([^()\s]+)|([()])", text)
    if any(stray for *_, stray in parts):
        raise ValueError(f"{text!r} has an unmatched parenthesis, or nothing in parentheses")
    return tuple(tuple((joined or name).split()) for joined, name, _ in parts)


@dataclass(frozen=True)
class WeightLayout:
    """The dims of a tensor in a file and of the parameter that the tensor fills.

    Attributes:
      text: the dims, in the form `FILE -> PARAMETER`. A text without an arrow means that the tensor
        and the parameter have the same dims.
      part: the index at which the parameter is taken from the dim that only the file's tensor has,
        or None if the tensor has no such dim.

    >>> WeightLayout("(H d) D -> D H d").read(np.zeros((6, 5)), (5, 2, 3)).shape
    (5, 2, 3)

    Raises:
      ValueError: the text does not describe a layout.
    """

    text: str
    part: int | None = None

    def __post_init__(self) -> None:
        names = [name for dim in self.file for name in dim]
        own = [name for dim in self.own for name in dim]
        left_out = [name for name in names if name not in own]
        indexed = all(name.isdigit() for name in left_out) and len(left_out) <= 1
        if any("=" in name and not name.partition("=")[2].isdigit() for name in names):
            raise ValueError(f"{self.text!r} must give a size as a number, such as i=16")
        if len(set(names)) < len(names) or not indexed or set(own) - set(names):
            raise ValueError(f"{self.text!r} must name the same dims on both sides, each once")

    @cached_property
    def file(self) -> Side:
        """The dims of the file's tensor."""
        return _parsed(self.text.partition("->")[0])

    @cached_property
    def own(self) -> Side:
        """The dims of the parameter, each of which is a tuple of names."""
        left, arrow, right = self.text.partition("->")
        return _parsed(right if arrow else left)

    def file_shape(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the file's tensor.

        Args:
          own: the shape of the parameter.

        Raises:
          ConfigError: the layout names another number of dims than the parameter has, or a size of
            the parameter is not a multiple of the sizes that the layout gives.
        """
        sizes = self._sizes(own)
        return tuple(math.prod(sizes[name] for name in dim) for dim in self.file)

    def opened(self, array: np.ndarray, own: tuple[int, ...]) -> np.ndarray:
        """Return a view of a file's tensor with one dim for each name on the parameter's side.

        The dims of the view are in the order of these names in the layout. An assignment to the
        view writes to the tensor.

        Args:
          array: the file's tensor.
          own: the shape of the parameter.
        """
        sizes = self._sizes(own)
        names = [name for dim in self.file for name in dim]
        view = array.reshape([sizes[name] for name in names])
        for name in [name for name in names if name not in self._order]:
            assert self.part is not None, self.text
            view = np.moveaxis(view, names.index(name), 0)[self.part]
            names.remove(name)
        return view.transpose([names.index(name) for name in self._order])

    def read(self, array: np.ndarray, own: tuple[int, ...]) -> np.ndarray:
        """Return a file's tensor with the shape of the parameter.

        The result is a view of the tensor, unless the layout joins dims of the parameter.

        Args:
          array: the file's tensor.
          own: the shape of the parameter.
        """
        return self.opened(array, own).reshape(own)

    def fill(self, array: np.ndarray, value: np.ndarray) -> None:
        """Write the value of a parameter to its part of a file's tensor.

        Args:
          array: the file's tensor.
          value: the value of the parameter.
        """
        view = self.opened(array, value.shape)
        view[...] = value.reshape(view.shape)

    @property
    def joins(self) -> bool:
        """Whether a dim of the parameter joins several dims, so that `read` copies."""
        return any(len(dim) > 1 for dim in self.own)

    @cached_property
    def _order(self) -> list[str]:
        return [name for dim in self.own for name in dim]

    def _sizes(self, own: tuple[int, ...]) -> dict[str, int]:
        if len(own) != len(self.own):
            raise ConfigError(
                f"{self.text!r} names {len(self.own)} dims on the right, but the parameter has "
                f"shape {own}: name each dim of the parameter once"
            )
        given = [name for dim in self.file for name in dim if name.isdigit() or "=" in name]
        sizes = {name: int(name.partition("=")[2] or name) for name in given}
        for size, dim in zip(own, self.own, strict=True):
            known = math.prod(sizes.get(name, 1) for name in dim)
            free = [name for name in dim if name not in sizes]
            if not known or size % known or len(free) > 1 or (not free and size != known):
                raise ConfigError(
                    f"{self.text!r} does not fit a parameter of shape {own}: the sizes of "
                    f"{' '.join(dim)} must multiply to {size}; give sizes, such as i=16"
                )
            sizes.update(dict.fromkeys(free, size // known))
        return sizes
