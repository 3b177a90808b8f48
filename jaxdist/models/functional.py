"""An NNX module as pure functions of plain nested dictionaries.

The step is jitted over plain dictionaries of arrays: jax flattens these dictionaries in C++,
checkpoints store them, and each array has a stable '/'-joined name. The module object exists only
while the step is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.models.feed_forward.measure import LOAD, Settle
from jaxdist.models.feed_forward.stack import RoutedStack
from jaxdist.models.layers import Deferred, Stacked, dims_of, whole
from jaxdist.models.mean import Sums
from jaxdist.models.scans import sliced
from jaxdist.models.tuning import lora
from jaxdist.models.tuning.lora import Adapter
from jaxdist.trees import divide, flatten_with_names
from jaxdist.types import Dims, Leaf, PyTree

KeyPath = tuple[Any, ...]
"""The path from a module to a variable: names of attributes, and indices in lists."""
NestedDict = dict[str, Any]
"""Nested dictionaries with string keys, whose leaves are arrays or the shapes of arrays."""


def nest(paths: Sequence[KeyPath], values: Sequence[Leaf]) -> NestedDict:
    """Return nested dictionaries that hold each value at its path."""
    tree: NestedDict = {}
    for path, value in zip(paths, values, strict=True):
        node = tree
        for key in path[:-1]:
            node = node.setdefault(str(key), {})
        node[str(path[-1])] = value
    return tree


def pick(paths: Sequence[KeyPath], tree: NestedDict) -> list[Leaf]:
    """Return the values of `tree` at `paths`, in the order of `paths`: the inverse of `nest`."""
    values = []
    for path in paths:
        node: PyTree = tree
        for key in path:
            node = node[str(key)]
        values.append(node)
    return values


def _name(path: KeyPath) -> str:
    return "/".join(map(str, path))


@dataclass(frozen=True)
class Functional:
    """A module as functions `init` and `bind`, with the names, shapes and dims of its parameters.

    Attributes:
      make: a function that builds the module from random streams.
      params: the parameters, a tree of `jax.ShapeDtypeStruct`.
      buffers: the arrays that are kept between steps but are not parameters, such as batch
        statistics, in the form of `params`.
      dims: the logical dims of each parameter by '/'-joined name, or None for a parameter whose
        dims the model does not name.
      scanned: the names of the parameters that `scan_blocks` reads layer by layer.
      stacked: the names of all parameters whose first dim counts layers, including `scanned`.
      frozen: the names of the parameters that are not trained.
      adapters: the low-rank adapters of kernels, whose parameters are among `params`.
      in_parts: whether the module has a method `parts`, which lists the parts that form pipeline
        stages.
      routed: whether blocks have routers, whose statistics go with activations through the blocks.
      settle: a function that moves the buffers after each step by the sums of the whole batch, or
        None if only forward passes change the buffers.
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    params: NestedDict
    buffers: NestedDict
    dims: Mapping[str, Dims | None]
    scanned: frozenset[str]
    stacked: frozenset[str]
    in_parts: bool
    _graph: nnx.GraphDef
    _param_paths: tuple[KeyPath, ...]
    _buffer_paths: tuple[KeyPath, ...]
    _rngs: tuple[tuple[KeyPath, type, tuple[int, ...]], ...]
    frozen: frozenset[str] = frozenset()
    adapters: tuple[Adapter, ...] = ()
    routed: bool = False
    settle: Settle | None = None

    def settled(self, buffers: NestedDict, sums: Sums) -> NestedDict:
        """Return the buffers after a step, with new biases of routers if the model has such biases.

        Args:
          buffers: the buffers after the forward passes of the step.
          sums: the sums of the whole batch.
        """
        return buffers if self.settle is None or LOAD not in sums else self.settle(buffers, sums)

    @property
    def trained(self) -> NestedDict:
        """The shapes of the parameters that are trained."""
        return self.divided(self.params)[0]

    def divided(self, params: NestedDict) -> tuple[NestedDict, NestedDict]:
        """Return the trained part and the frozen part of a tree that has the names of `params`."""
        return divide(params, self.frozen)

    def init(self, key: jax.Array) -> tuple[NestedDict, NestedDict]:
        """Create the model's parameters and buffers from a random key.

        Under `jax.jit` with out_shardings, each device creates only its shards.
        """
        # With eager sharding, flax needs a mesh to create a parameter with sharding metadata.
        with nnx.use_eager_sharding(False):
            module = self.make(nnx.Rngs(key))
        _, params, _, buffers = nnx.split(module, nnx.Param, nnx.RngState, ...)
        own = _values(params, self._param_paths)
        if self.adapters:
            # The module draws from `key` itself, so the adapters need a different key.
            drawn = lora.init(self.adapters, jax.random.fold_in(key, len(self._param_paths)))
            own |= nest([tuple(name.split("/")) for name in drawn], [*drawn.values()])
        return own, _values(buffers, self._buffer_paths)

    def bind(
        self,
        params: NestedDict,
        buffers: NestedDict,
        key: jax.Array | None = None,
        *,
        statistics_over: tuple[str, ...] = (),
    ) -> nnx.Module:
        """Build the module with the given parameters.

        Random layers draw from `key`; None means key 0.

        A `Deferred` parameter is gathered here, unless `scan_blocks` reads it: `scan_blocks`
        gathers it layer by layer.

        Args:
          statistics_over: the manual mesh axes over which batch norms average their statistics. A
            batch norm that already names axes keeps its axes.
        """
        given = dict(zip(self._names, pick(self._param_paths, params), strict=True))
        if self.adapters:
            own = {name: pick([tuple(name.split("/"))], params)[0] for name in self._adapter_names}
            given |= lora.bound(self.adapters, given | own, key)
        key = jax.random.key(0) if key is None else key
        values = [x if name in self.scanned else whole(x) for name, x in given.items()]
        flat = [
            *zip(self._param_paths, values, strict=True),
            *zip(self._buffer_paths, pick(self._buffer_paths, buffers), strict=True),
            *self._random(key, self._lengths(values)),
        ]
        module = nnx.merge(self._graph, nnx.from_flat_state(flat), copy=True)
        if statistics_over:
            _average(module, statistics_over)
        return module

    @property
    def _names(self) -> list[str]:
        """The names of the parameters, except the parameters of adapters."""
        return [_name(path) for path in self._param_paths]

    @property
    def _adapter_names(self) -> list[str]:
        return [name for adapter in self.adapters for name in adapter.names]

    def adapted(self, adapters: Sequence[Adapter]) -> Functional:
        """Return the model with adapters; only the adapters are trained."""
        names = [name for adapter in adapters for name in adapter.names]
        shapes = [shape for adapter in adapters for shape in adapter.shapes]
        dims = [found for adapter in adapters for found in adapter.all_dims]
        structs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        stacked = {name for adapter in adapters if adapter.layers for name in adapter.names}
        return replace(
            self,
            params=self.params | nest([tuple(name.split("/")) for name in names], structs),
            dims={**self.dims, **dict(zip(names, dims, strict=True))},
            stacked=self.stacked | stacked,
            frozen=frozenset(self._names),
            adapters=tuple(adapters),
        )

    def merged(self, params: NestedDict) -> NestedDict:
        """Return the parameters without adapters, where each adapter is added to its kernel."""
        if not self.adapters:
            return params
        values = lora.merge(self.adapters, dict(flatten_with_names(params)))
        return nest(self._param_paths, [values[name] for name in self._names])

    def _lengths(self, values: Sequence[Leaf]) -> dict[int, int]:
        """Map the number of layers of each stack in the model to the number of layers in `values`.

        The two numbers differ for a chunk of a pipeline, which has fewer layers than the model.
        """
        declared = pick(self._param_paths, self.params)
        return {
            struct.shape[0]: value.shape[0]
            for path, struct, value in zip(self._param_paths, declared, values, strict=True)
            if _name(path) in self.stacked and not isinstance(value, Deferred)
        }

    def _random(
        self, key: jax.Array, lengths: Mapping[int, int]
    ) -> Iterator[tuple[KeyPath, jax.Array]]:
        """Yield the random streams of a key; each layer of a stack has a separate stream."""
        for i, (path, kind, shape) in enumerate(self._rngs):
            here = tuple(lengths.get(size, size) for size in shape)
            if not issubclass(kind, nnx.RngKey):
                yield path, jnp.zeros(here, jnp.uint32)
                continue
            fresh = jax.random.fold_in(key, i)
            yield path, jax.random.split(fresh, here) if here else fresh

    def with_stacks(self, forward: Callable[..., PyTree], *given: PyTree) -> Functional:
        """Add to `stacked` the stacks over which a forward pass scans, and return the new model.

        A module is such a stack if scans cut all its parameters into the same number of slices. The
        forward pass, `forward(module, *given)`, is only traced, and not run.
        """

        def run(params: NestedDict, buffers: NestedDict, given: PyTree) -> None:
            module = self.bind(params, buffers)
            module.eval()
            forward(module, *given)

        named = flatten_with_names(self.params)
        jaxpr = jax.make_jaxpr(run)(self.params, self.buffers, given).jaxpr
        # `run` takes the parameters before all other arguments.
        cut = {named[i][0]: named[i][1].shape[0] for i in sliced(jaxpr) if i < len(named)}
        modules: dict[str, set[int | None]] = {}
        for name, _ in named:
            for module in _modules(name):
                modules.setdefault(module, set()).add(cut.get(name))
        stacks = {module for module, lengths in modules.items() if len(lengths) == 1}
        found = {name for name in cut if any(module in stacks for module in _modules(name))}
        return replace(self, stacked=self.stacked | found)

    def with_dims(self, dims: Mapping[str, Dims]) -> Functional:
        """Return the model with the given dims for its parameters.

        A parameter whose first dim is "layers" is added to `stacked`.
        """
        return replace(self, dims=dims, stacked=self.stacked | _counting_layers(dims))

    def buffers_of(self, module: nnx.Module) -> NestedDict:
        """Return the buffers of `module`, for example after a forward pass."""
        state = nnx.split(module, nnx.Param, nnx.RngState, ...)[3]
        return _values(state, self._buffer_paths)


def _average(module: nnx.Module, axes: tuple[str, ...]) -> None:
    """Let the batch norms of a module average their statistics over mesh axes.

    Only batch norms of flax NNX and of jaxdist's adapters can average over axes.
    `jaxdist.experiment.rows` detects and refuses batch norms of other kinds.
    """
    for _, node in nnx.iter_modules(module):
        if isinstance(node, nnx.BatchNorm) and node.axis_name is None:
            # The attribute is annotated as a string, but jax also accepts a tuple of axes.
            node.axis_name = axes  # pyright: ignore[reportAttributeAccessIssue]
        elif hasattr(node, "statistics_over"):
            # The adapter of another library's module passes the axes to the batch norms of this
            # module.
            setattr(node, "statistics_over", axes)  # noqa: B010


def batch_norms(module: nnx.Module) -> list[nnx.BatchNorm]:
    """List the batch norms of flax NNX in a module."""
    return [node for _, node in nnx.iter_modules(module) if isinstance(node, nnx.BatchNorm)]


def _counting_layers(dims: Mapping[str, Dims | None]) -> set[str]:
    return {name for name, found in dims.items() if found and found[0] == "layers"}


def _modules(name: str) -> list[str]:
    """Return the names of the modules that hold a parameter.

    >>> _modules("blocks/norm/scale")
    ['blocks', 'blocks/norm']
    """
    parts = name.split("/")
    return ["/".join(parts[:i]) for i in range(1, len(parts))]


def _values(state: PyTree, paths: Sequence[KeyPath]) -> NestedDict:
    found = {path: variable[...] for path, variable in nnx.to_flat_state(state)}
    return nest(paths, [found[path] for path in paths])


def functional(make: Callable[[nnx.Rngs], nnx.Module]) -> Functional:
    """Return a module as pure functions, and compute only the shapes of its parameters.

    Args:
      make: a function that builds the module from `nnx.Rngs`. The function is traced here, and
        called again by `init`.
    """
    with nnx.use_eager_sharding(False):
        module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph, params, rngs, buffers = nnx.split(module, nnx.Param, nnx.RngState, ...)
    flat_params, flat_buffers, flat_rngs = (
        list(nnx.to_flat_state(state)) for state in (params, buffers, rngs)
    )

    def shapes(flat: Sequence[tuple[KeyPath, nnx.Variable]]) -> NestedDict:
        structs = [jax.ShapeDtypeStruct(v.shape, v.dtype) for _, v in flat]
        return nest([path for path, _ in flat], structs)

    dims = {_name(path): dims_of(variable) for path, variable in flat_params}
    own = isinstance(module, Stacked)
    scanned = frozenset(
        _name(path)
        for path, variable in flat_params
        if variable.get_metadata().get("scanned") or (own and path[0] == "blocks")
    )
    return Functional(
        make=make,
        params=shapes(flat_params),
        buffers=shapes(flat_buffers),
        dims=dims,
        scanned=scanned,
        stacked=scanned | _counting_layers(dims),
        in_parts=hasattr(module, "parts"),
        _graph=graph,
        _param_paths=tuple(path for path, _ in flat_params),
        _buffer_paths=tuple(path for path, _ in flat_buffers),
        _rngs=tuple((path, type(variable), variable.shape) for path, variable in flat_rngs),
        routed=isinstance(module, RoutedStack) and module.experts is not None,
        settle=module.settling() if isinstance(module, RoutedStack) else None,
    )
