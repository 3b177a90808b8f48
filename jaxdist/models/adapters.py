"""Adapters for models that are not flax NNX: linen modules, equinox modules and plain functions.

Each adapter returns a function from `nnx.Rngs` to the model. `jaxdist.functional` and the config's
`model: {type: import}` accept such a function. The name of each parameter is its path in the model,
so that `sharding.params` can name its dims.

    def make(rngs, hidden):                       # model: {type: import, path: "mymodels:make"}
        return from_linen(MyModel(hidden), jnp.zeros((1, 8, 8, 1)))(rngs)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from flax import linen, nnx

from jaxdist.models.functional import nest, pick
from jaxdist.trees import flatten_with_names
from jaxdist.types import Buffers, Params, PyTree

Make = Callable[[nnx.Rngs], nnx.Module]
Init = Callable[[jax.Array], Any]
"""A function from a random key to the parameters, a tree of arrays."""
Apply = Callable[..., Any]
"""A function from (params, *inputs) to outputs, for a whole batch."""


class Call(NamedTuple):
    """The arguments of a call that a module needs in addition to its inputs.

    Attributes:
      training: whether the model is in training mode, in which random layers (dropout) are active
        and norms use the batch's statistics.
      key: the random key of the layers that draw, such as dropout.
      statistics_over: the mesh axes over which batch norms average their statistics.
    """

    training: bool
    key: jax.Array
    statistics_over: tuple[str, ...]


class _Plain(nnx.Module):
    """An NNX module that holds parameters and buffers, and calls a pure function of them.

    Args:
      params: the parameters, nested dicts of arrays.
      buffers: the other state, nested dicts of arrays, which each call may replace.
      apply: a function from (params, buffers, inputs, call) to (outputs, new buffers).
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        buffers: Mapping[str, Any],
        apply: Callable[..., tuple[Any, Any]],
        rngs: nnx.Rngs,
    ):
        self.params = nnx.data(jax.tree.map(nnx.Param, dict(params)))
        self.buffers = nnx.data(jax.tree.map(nnx.BatchStat, dict(buffers)))
        self.apply = apply
        self.rngs = rngs.fork()
        # `nnx.Module.eval` and `nnx.Module.train` set this attribute by its name.
        self.deterministic = False
        self.statistics_over: tuple[str, ...] = ()

    def __call__(self, *inputs: PyTree) -> PyTree:
        """Call `apply` on the inputs, store the new buffers, and return the outputs."""
        params, buffers = (_values(tree) for tree in (self.params, self.buffers))
        call = Call(not self.deterministic, self.rngs.dropout(), self.statistics_over)
        out, new = self.apply(params, buffers, inputs, call)
        jax.tree.map(_set, self.buffers, new, is_leaf=_is_variable)
        return out


def from_functions(init: Init, apply: Apply) -> Make:
    """Return a function of `nnx.Rngs` that makes a model from two plain functions.

    Args:
      init: a function from a random key to a tree of arrays; the paths in this tree become the
        names of the parameters.
      apply: a function from (params, *inputs) to outputs, for a whole batch.
    """

    def make(rngs: nnx.Rngs) -> nnx.Module:
        params = init(rngs.params())
        structure = jax.tree.structure(params)
        named = flatten_with_names(params)
        paths = [tuple(name.split("/")) for name, _ in named]

        def run(nested: PyTree, buffers: Buffers, inputs: PyTree, call: Call) -> tuple[Any, Any]:
            return apply(structure.unflatten(pick(paths, nested)), *inputs), buffers

        return _Plain(nest(paths, [leaf for _, leaf in named]), {}, run, rngs)

    return make


def from_linen(module: Any, *example: Any) -> Make:
    """Return a function of `nnx.Rngs` that makes a model from a `flax.linen.Module`.

    The collection "params" becomes the parameters, and all other collections become buffers.

    If the module's `__call__` has an argument `train`, `training` or `deterministic`, the model
    sets that argument in each call, according to its mode (training or evaluation).

    Args:
      module: the linen module.
      example: example inputs, with any number of rows; the shapes of parameters follow from these
        inputs.
    """
    flag = next((n for n in ("train", "training", "deterministic") if n in _arguments(module)), "")

    def told(training: bool) -> dict[str, bool]:
        return {flag: training != (flag == "deterministic")} if flag else {}

    def make(rngs: nnx.Rngs) -> nnx.Module:
        streams = {"params": rngs.params(), "dropout": rngs.dropout()}
        variables = dict(module.init(streams, *example, **told(False)))
        params = variables.pop("params", {})

        def run(params: Params, buffers: Buffers, inputs: PyTree, call: Call) -> tuple[Any, Any]:
            # With an empty list of collections that may change, `apply` still returns a pair. With
            # False it would return the outputs alone.
            changed = [*buffers] if call.training else []
            with _averaging(call.statistics_over):
                out, new = module.apply(
                    {"params": params, **buffers},
                    *inputs,
                    **told(call.training),
                    mutable=changed,
                    rngs={"dropout": call.key},
                )
            return out, {**buffers, **new}

        return _Plain(params, variables, run, rngs)

    return make


def from_equinox(build: Callable[[jax.Array], Any]) -> Make:
    """Return a function of `nnx.Rngs` that makes a model from an `equinox.Module`.

    The equinox module computes a single example; the model maps it over the rows of a batch.

    The parameters are the inexact arrays of the equinox module. All its other fields are constant.

    Args:
      build: a function from a random key to the equinox module.
    """
    import equinox  # The import is here, because equinox is an optional dependency.

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = build(rngs.params())
        arrays, constants = equinox.partition(model, equinox.is_inexact_array)

        def apply(arrays: PyTree, *inputs: PyTree) -> PyTree:
            return jax.vmap(equinox.combine(arrays, constants))(*inputs)

        return from_functions(lambda _: arrays, apply)(rngs)

    return make


@contextmanager
def _averaging(axes: tuple[str, ...]) -> Iterator[None]:
    """Let linen's batch norms average their statistics over mesh axes inside the context.

    A batch norm that already names axes keeps its axes.
    """
    if not axes:
        yield
        return

    def run(call: Any, args: tuple[Any, ...], named: dict[str, Any], context: Any) -> Any:
        norm = context.module
        if not isinstance(norm, linen.BatchNorm) or norm.axis_name is not None:
            return call(*args, **named)
        # Linen modules are frozen, but this module is a copy for a single call of `apply`, so it is
        # safe to change.
        object.__setattr__(norm, "axis_name", axes)
        try:
            return call(*args, **named)
        finally:
            object.__setattr__(norm, "axis_name", None)

    with linen.intercept_methods(run):
        yield


def _arguments(module: Any) -> Mapping[str, Any]:
    return inspect.signature(type(module).__call__).parameters


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def _values(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda variable: variable[...], tree, is_leaf=_is_variable)


def _set(variable: nnx.Variable[Any], value: jax.Array) -> None:
    variable[...] = value
