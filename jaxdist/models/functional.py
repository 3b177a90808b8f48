"""An NNX module taken apart into pure functions of plain nested dictionaries.

The step is jitted over plain dictionaries of arrays: they flatten in C++, are what a checkpoint
holds, and have stable '/'-joined names. The module object exists only while it is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.models.layers import whole

Path = tuple[Any, ...]
Dims = tuple[str | None, ...]
Tree = dict[str, Any]


def nest(paths: Sequence[Path], values: Sequence[Any]) -> Tree:
    """Values at paths as nested dictionaries with string keys."""
    tree: Tree = {}
    for path, value in zip(paths, values, strict=True):
        node = tree
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[str(path[-1])] = value
    return tree


def pick(paths: Sequence[Path], tree: Tree) -> list[Any]:
    """The inverse of `nest`: the values of `tree` at `paths`, in that order."""
    values = []
    for path in paths:
        node: Any = tree
        for key in path:
            node = node[str(key)]
        values.append(node)
    return values


def _name(path: Path) -> str:
    return "/".join(map(str, path))


def _dims(variable: nnx.Variable) -> Dims | None:
    """The logical dims of a parameter: our `dims`, or flax's own logical sharding metadata."""
    metadata = variable.get_metadata()
    for key in ("dims", "out_sharding", "sharding_names", "sharding"):
        found = metadata.get(key)
        if found is not None:
            return tuple(found)
    return None


@dataclass(frozen=True)
class Functional:
    """A module as `init` and `bind`, with its parameters' names, shapes and dims known.

    Attributes:
      make: builds the module from random streams.
      params: tree of `jax.ShapeDtypeStruct`, the trainable parameters.
      buffers: the same for other state that is kept (batch statistics).
      dims: '/'-joined parameter name to its logical dims, or None where none are named.
      scanned: names of the parameters that `scan_blocks` reads layer by layer.
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    params: Tree
    buffers: Tree
    dims: Mapping[str, Dims | None]
    scanned: frozenset[str]
    _graph: Any
    _param_paths: tuple[Path, ...]
    _buffer_paths: tuple[Path, ...]
    _rng_paths: tuple[Path, ...]
    _rng_types: tuple[type, ...]

    def init(self, key: jax.Array) -> tuple[Tree, Tree]:
        """Fresh parameters and buffers; jit it with out_shardings to create them in place."""
        with nnx.use_eager_sharding(False):
            module = self.make(nnx.Rngs(key))
        _, params, _, buffers = nnx.split(module, nnx.Param, nnx.RngState, ...)
        return _values(params, self._param_paths), _values(buffers, self._buffer_paths)

    def bind(
        self,
        params: Tree,
        buffers: Tree,
        key: jax.Array | None = None,
        *,
        statistics_over: tuple[str, ...] = (),
    ) -> nnx.Module:
        """The module with these values; random layers draw from `key` (a zero key when None).

        A `Deferred` parameter is made whole here, or in `scan_blocks` if that is what reads it.

        Args:
          statistics_over: manual mesh axes over which batch norms average their statistics, unless
            they name axes of their own.
        """
        key = jax.random.key(0) if key is None else key
        values = [
            value if _name(path) in self.scanned else whole(value)
            for path, value in zip(self._param_paths, pick(self._param_paths, params), strict=True)
        ]
        flat = [
            *zip(self._param_paths, values, strict=True),
            *zip(self._buffer_paths, pick(self._buffer_paths, buffers), strict=True),
        ]
        for i, (path, kind) in enumerate(zip(self._rng_paths, self._rng_types, strict=True)):
            fresh = jax.random.fold_in(key, i) if issubclass(kind, nnx.RngKey) else jnp.uint32(0)
            flat.append((path, fresh))
        module = nnx.merge(self._graph, nnx.from_flat_state(flat), copy=True)
        for norm in batch_norms(module) if statistics_over else ():
            if norm.axis_name is None:
                norm.axis_name = statistics_over  # pyright: ignore[reportAttributeAccessIssue]
        return module

    def buffers_of(self, module: nnx.Module) -> Tree:
        """The buffers that a forward pass left in `module`."""
        state = nnx.split(module, nnx.Param, nnx.RngState, ...)[3]
        return _values(state, self._buffer_paths)


def batch_norms(module: nnx.Module) -> list[nnx.BatchNorm]:
    """The layers of a module that look across the rows of a batch."""
    return [node for _, node in nnx.iter_modules(module) if isinstance(node, nnx.BatchNorm)]


def _values(state: Any, paths: Sequence[Path]) -> Tree:
    found = {path: variable[...] for path, variable in nnx.to_flat_state(state)}
    return nest(paths, [found[path] for path in paths])


def functional(make: Callable[[nnx.Rngs], nnx.Module]) -> Functional:
    """Take a module apart without computing it (shapes only).

    Args:
      make: builds the module from `nnx.Rngs`; called once abstractly here, and again by `init`.
    """
    with nnx.use_eager_sharding(False):
        module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, params, rngs, buffers = nnx.split(module, nnx.Param, nnx.RngState, ...)
    flat_params, flat_buffers, flat_rngs = (
        list(nnx.to_flat_state(state)) for state in (params, buffers, rngs)
    )

    def shapes(flat: list[tuple[Path, Any]]) -> Tree:
        structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for _, v in flat]
        return nest([path for path, _ in flat], structs)

    return Functional(
        make=make,
        params=shapes(flat_params),
        buffers=shapes(flat_buffers),
        dims={_name(path): _dims(variable) for path, variable in flat_params},
        scanned=frozenset(
            _name(path) for path, variable in flat_params if variable.get_metadata().get("scanned")
        ),
        _graph=graph,
        _param_paths=tuple(path for path, _ in flat_params),
        _buffer_paths=tuple(path for path, _ in flat_buffers),
        _rng_paths=tuple(path for path, _ in flat_rngs),
        _rng_types=tuple(type(variable) for _, variable in flat_rngs),
    )
