"""Models that are not flax NNX: from linen, from equinox, or from plain functions.

Each adapter returns a function of `nnx.Rngs` for `jaxdist.functional` and `model: {type: import}`.
Parameters keep their paths as names, so that `sharding.params` can name their dims.

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
"""Function from a key to parameters: a tree of arrays."""
Apply = Callable[..., Any]
"""Function from (params, *inputs) to outputs, for a whole batch."""


class Call(NamedTuple):
    """The arguments of a call that a module needs besides its inputs.

    Attributes:
      training: whether random layers draw, and norms use the batch's statistics.
      key: the key of the random layers.
      statistics_over: mesh axes over which batch norms average their statistics.
    """

    training: bool
    key: jax.Array
    statistics_over: tuple[str, ...]


class _Plain(nnx.Module):
    """A module of parameters and a pure function of them.

    Args:
      params: nested dicts of arrays.
      buffers: other state that calls change, as nested dicts too.
      apply: function from (params, buffers, inputs, call) to (outputs, new buffers).
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
        self.training = True
        self.statistics_over: tuple[str, ...] = ()

    def train(self, **attributes: Any) -> None:
        """Enter training mode, in which random layers draw and norms use the batch's statistics."""
        self.training = True
        super().train(**attributes)

    def eval(self, **attributes: Any) -> None:
        """Leave training mode."""
        self.training = False
        super().eval(**attributes)

    def __call__(self, *inputs: PyTree) -> PyTree:
        """Call `apply` on the inputs, and keep the buffers that it returns."""
        params, buffers = (_values(tree) for tree in (self.params, self.buffers))
        call = Call(self.training, self.rngs.dropout(), self.statistics_over)
        out, new = self.apply(params, buffers, inputs, call)
        jax.tree.map(_set, self.buffers, new, is_leaf=_is_variable)
        return out


def from_functions(init: Init, apply: Apply) -> Make:
    """Make a model of plain functions.

    Args:
      init: function from a key to a tree of arrays, whose paths become the parameters' names.
      apply: function from (params, *inputs) to outputs, for a whole batch.
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
    """Make a model of a `flax.linen.Module`; collections other than "params" are buffers.

    An argument `train`, `training` or `deterministic` of the module's `__call__` gets the mode.

    Args:
      example: inputs with any number of rows, from which shapes are inferred.
    """
    flag = next((n for n in ("train", "training", "deterministic") if n in _arguments(module)), "")

    def told(training: bool) -> dict[str, bool]:
        return {flag: training != (flag == "deterministic")} if flag else {}

    def make(rngs: nnx.Rngs) -> nnx.Module:
        streams = {"params": rngs.params(), "dropout": rngs.dropout()}
        variables = dict(module.init(streams, *example, **told(False)))
        params = variables.pop("params", {})

        def run(params: Params, buffers: Buffers, inputs: PyTree, call: Call) -> tuple[Any, Any]:
            # An empty list, unlike False, still makes `apply` return a pair.
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
    """Make a model of an `equinox.Module` for one example, mapped over the rows of a batch.

    The module's inexact arrays are the parameters; everything else in it is constant.

    Args:
      build: function from a key to the module.
    """
    import equinox  # Imported here, because equinox is an optional dependency.

    def make(rngs: nnx.Rngs) -> nnx.Module:
        model = build(rngs.params())
        arrays, constants = equinox.partition(model, equinox.is_inexact_array)

        def apply(arrays: PyTree, *inputs: PyTree) -> PyTree:
            return jax.vmap(equinox.combine(arrays, constants))(*inputs)

        return from_functions(lambda _: arrays, apply)(rngs)

    return make


@contextmanager
def _averaging(axes: tuple[str, ...]) -> Iterator[None]:
    """Let linen's batch norms average over these axes, unless a norm has axes of its own."""
    if not axes:
        yield
        return

    def run(call: Any, args: tuple[Any, ...], named: dict[str, Any], context: Any) -> Any:
        norm = context.module
        if not isinstance(norm, linen.BatchNorm) or norm.axis_name is not None:
            return call(*args, **named)
        # Linen modules are frozen, but this module is a copy that belongs to the call of `apply`.
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
