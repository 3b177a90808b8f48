"""The config's optimizer on servers: a jitted update of a single range of a parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.optim.build import ImportedOptimizerConfig
from jaxdist.optim.common import OptimizerConfig
from jaxdist.param_server.contract import RuleState
from jaxdist.param_server.live.shard import updated
from jaxdist.param_server.placement.ranges import updates_elementwise
from jaxdist.param_server.training.separable import server_transform
from jaxdist.train.strategy.statistics import is_statistic
from jaxdist.trees import flatten_with_names
from jaxdist.types import Dims, Params, PyTree


class _Compiled(NamedTuple):
    """An update rule for arrays with the same dims.

    Attributes:
      wrapped: the function from an array to the tree that the transformation receives.
    """

    transform: optax.GradientTransformationExtraArgs
    wrapped: Callable[[PyTree], PyTree]
    step: Callable[..., tuple[jax.Array, RuleState]]


class ServerRule:
    """A rule that updates ranges of parameters as the config's optimizer updates whole parameters.

    Attributes:
      learning_rate: the largest learning rate of the run.
      divisible: whether a range may consist of only some rows of a parameter; False if the update
        needs a norm of the whole parameter.
    """

    def __init__(
        self,
        optim: OptimizerConfig,
        schedule: optax.Schedule,
        params: Params,
        dims: Mapping[str, Dims],
        *,
        learning_rate: float,
        updates_per_step: int = 1,
    ) -> None:
        """Prepare a rule that all servers share.

        Args:
          schedule: the function from the number of steps of all workers to the learning rate.
          params: all parameters, or their shapes.
          dims: the logical dims of each parameter, by name.
          updates_per_step: the number of updates of a range in a step of all workers.
        """
        self.learning_rate = learning_rate
        self.divisible = updates_elementwise(optim)
        self._optim, self._params, self._dims = optim, params, dims
        self._schedule = schedule
        if updates_per_step > 1:
            self._schedule = lambda count: schedule(count // updates_per_step)
        self._of = cache(self._compile)

    def init(self, name: str, array: np.ndarray) -> RuleState:
        """Return the optimizer's state for a range of a parameter."""
        if is_statistic(name):
            return ()
        rule = self._rule(name)
        return rule.transform.init(rule.wrapped(self._shaped(name, array)))

    def update(
        self, name: str, array: np.ndarray, gradient: np.ndarray, rate: float, state: RuleState
    ) -> tuple[np.ndarray, RuleState]:
        """Return the updated array and the optimizer's next state.

        Args:
          rate: the factor by which the learning rate is multiplied.
        """
        if is_statistic(name):
            return array - (gradient if rate == 1 else np.float32(rate) * gradient), state
        given = (self._shaped(name, array), self._shaped(name, gradient), state)
        # A rate of 1 is left out of the program, because a program with this factor rounds
        # differently than the program on a mesh.
        factor = () if rate == 1 else (np.float32(rate),)
        new, state = self._rule(name).step(*given, *factor)
        return np.asarray(new).reshape(array.shape), state

    def _shaped(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return the array in the model's shape: servers hold a scalar as a single row."""
        return array if self._dims[name] else array.reshape(())

    def _rule(self, name: str) -> _Compiled:
        # An imported rule may depend on the name; other rules depend on the dims alone.
        imported = isinstance(self._optim, ImportedOptimizerConfig)
        return self._of(name if imported else None, self._dims[name])

    def _compile(self, name: str | None, dims: Dims) -> _Compiled:
        wrapped = partial(_alone, self._params, name) if name else _bare
        shape = jax.ShapeDtypeStruct((1,) * len(dims), jnp.float32)
        named = {name or "array": dims}
        transform = server_transform(self._optim, self._schedule, wrapped(shape), named)

        def step(
            array: jax.Array, gradient: jax.Array, state: RuleState, *rate: jax.Array
        ) -> tuple[jax.Array, RuleState]:
            params, grads = wrapped(array), wrapped(gradient.astype(array.dtype))
            found, state = updated(transform, grads, state, params, *rate)
            (new,) = jax.tree.leaves(found)
            return new, state

        return _Compiled(transform, wrapped, jax.jit(step))


def _bare(array: PyTree) -> PyTree:
    return {"array": array}


def _alone(params: Params, name: str, array: PyTree) -> PyTree:
    """Return the tree of the parameters with `array` as the leaf `name`, and None elsewhere."""
    leaves = [array if other == name else None for other, _ in flatten_with_names(params)]
    return jax.tree.unflatten(jax.tree.structure(params), leaves)
