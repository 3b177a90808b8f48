"""The layout of a shard as one flat array: ranges concatenated in the order of the placement."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxdist.errors import ConfigError
from jaxdist.param_server.contract import Arrays
from jaxdist.param_server.placement.contract import Placement
from jaxdist.param_server.placement.ranges import Range
from jaxdist.trees import flatten_with_names
from jaxdist.types import Params
from jaxdist.wire.contract import Spec


@dataclass(frozen=True)
class ShardPiece:
    """A range's position in its shard's flat array.

    Attributes:
      shape: the number of rows of the range, then the sizes of the parameter's other dims; a scalar
        has one row.
      offset: the number of elements before the range.
      dtype: the dtype of the parameter. The dtype of the flat array can represent every value of
        this dtype.
    """

    range: Range
    shape: tuple[int, ...]
    offset: int
    dtype: np.dtype

    @property
    def length(self) -> int:
        return math.prod(self.shape)

    @property
    def slice(self) -> slice:
        return slice(self.offset, self.offset + self.length)


@dataclass(frozen=True)
class ShardLayout:
    """The ranges of one server in a flat array.

    Attributes:
      server: the number of the server, which is also the number of its shard.
      dtype: the dtype of the flat array and of payloads, into which parameters of several dtypes
        are widened.
    """

    server: int
    dtype: np.dtype
    pieces: tuple[ShardPiece, ...]

    @property
    def length(self) -> int:
        return sum(piece.length for piece in self.pieces)

    @property
    def spec(self) -> Spec:
        """The required shard, dtype and length of a payload."""
        return Spec(self.server, self.dtype, self.length)

    def flatten(self, arrays: Arrays) -> np.ndarray:
        """Return the shard's part of parameters or gradients by name, as one array `[length]`."""
        flat = np.empty(self.length, self.dtype)
        for piece in self.pieces:
            rows = np.atleast_1d(arrays[piece.range.name])[piece.range.start : piece.range.stop]
            flat[piece.slice] = rows.reshape(-1)
        return flat


def split_pieces(layout: ShardLayout, flat: np.ndarray) -> list[tuple[ShardPiece, np.ndarray]]:
    """Return each range of a flat array, in the range's shape and dtype."""
    return [
        (piece, flat[piece.slice].reshape(piece.shape).astype(piece.dtype, copy=False))
        for piece in layout.pieces
    ]


def layouts(placement: Placement, params: Params) -> tuple[ShardLayout, ...]:
    """Return the layout of each server's shard.

    Args:
      params: the parameters, or their shapes.

    Raises:
      ConfigError: the parameters have several dtypes, some of which are not float dtypes.
    """
    named = dict(flatten_with_names(params))
    dtypes = {np.dtype(leaf.dtype) for leaf in named.values()}
    other = sorted(str(dtype) for dtype in dtypes if not jnp.issubdtype(dtype, jnp.floating))
    if len(dtypes) > 1 and other:
        raise ConfigError(
            f"strategy type parameter_server: some parameters are {', '.join(other)} and others "
            "are not, but a server can combine several dtypes only if all of them are floats: use "
            "floats for all parameters"
        )
    # The wider dtype has all values of the narrower dtypes.
    dtype = np.dtype(functools.reduce(jnp.promote_types, dtypes))
    found: list[ShardLayout] = []
    for server in placement.servers:
        pieces: list[ShardPiece] = []
        offset = 0
        for part in placement.held(server):
            shape = (part.stop - part.start, *named[part.name].shape[1:])
            pieces.append(ShardPiece(part, shape, offset, np.dtype(named[part.name].dtype)))
            offset += pieces[-1].length
        found.append(ShardLayout(server, dtype, tuple(pieces)))
    return tuple(found)


def joined_shards(
    shards: Sequence[ShardLayout],
    flats: Sequence[np.ndarray],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, np.ndarray]:
    """Join shards to parameters by name; a parameter of one range is a view of its shard's array.

    Args:
      shapes: the shapes of the parameters, by name.
    """
    parts: dict[str, list[tuple[int, np.ndarray]]] = {name: [] for name in shapes}
    for layout, flat in zip(shards, flats, strict=True):
        for piece, rows in split_pieces(layout, flat):
            parts[piece.range.name].append((piece.range.start, rows))
    found: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        rows = [array for _, array in sorted(parts[name], key=lambda part: part[0])]
        whole = rows[0] if len(rows) == 1 else np.concatenate(rows)
        found[name] = whole.reshape(shape)
    return found
