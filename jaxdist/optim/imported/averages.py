"""The parameters to evaluate, for optimizers whose model differs from the trained parameters.

Schedule-free optimizers (Defazio et al., arXiv 2405.15682) take gradients at a point between an
average and the last iterate, and the average is the model. Other optimizers keep an average of the
parameters (EMA, Polyak) in their state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr, Literal, Var
from optax.contrib import ScheduleFreeState, schedule_free_eval_params

from jaxdist.config.importing import load_object
from jaxdist.errors import ConfigError, some_of
from jaxdist.optim.precision import MasterState, MomentsState
from jaxdist.optim.safety import SkipState
from jaxdist.trees import flatten_with_names
from jaxdist.types import OptState, Params, PyTree

EvalParams = Callable[[OptState, Params], Params]
"""A function from (optimizer's state, trained parameters) to the parameters to evaluate."""
_SAME = ("copy", "copy_p", "convert_element_type", "optimization_barrier")


def eval_params_of(
    path: str | None, rule: optax.GradientTransformation, params: Params
) -> EvalParams | None:
    """Return the function that computes the parameters to evaluate.

    The result is None if the trained parameters are to be evaluated.

    Args:
      path: the import path of a function of (the rule's state, trained parameters). If the path is
        None, the function is known only for `optax.contrib.schedule_free`, and for all other
        optimizers the result is None.
      rule: the optimizer without the wrappers of `jaxdist.optim.build`.
      params: the parameters, or their shapes.
    """
    if path is not None:
        return _unwrapped(load_object(path), f"optim.eval_params {path}")
    state = jax.eval_shape(rule.init, params)
    free = _schedule_free(state)
    if free is None or jax.tree.structure(free.z) != jax.tree.structure(params):
        return None

    def average(state: OptState, params: Params) -> Params:
        return schedule_free_eval_params(_schedule_free(state), params)

    return _unwrapped(average, "optax.contrib.schedule_free_eval_params")


def _schedule_free(state: OptState) -> Any:
    def is_free(node: object) -> bool:
        return isinstance(node, ScheduleFreeState)

    return next(filter(is_free, jax.tree.leaves(state, is_leaf=is_free)), None)


def _unwrapped(function: EvalParams, what: str) -> EvalParams:
    """Convert a function of the rule's state into a function of the optimizer's complete state.

    The parameters that the function returns have the dtypes of the trained parameters.

    Args:
      what: a description of the function, for errors.
    """

    def run(state: OptState, params: Params) -> Params:
        own = params
        while isinstance(state, SkipState | MomentsState | MasterState):
            own = state.master if isinstance(state, MasterState) else own
            state = state.inner
        found = function(state, own)
        if _shapes(found) != _shapes(params):
            raise ConfigError(
                f"{what} gives {_shown(found)}, but the parameters are {_shown(params)}: return "
                "a tree with the structure of its argument"
            )
        return jax.tree.map(lambda new, old: new.astype(old.dtype), found, params)

    return run


def _shapes(tree: PyTree) -> Mapping[str, tuple[int, ...]]:
    return {name: jnp.shape(leaf) for name, leaf in flatten_with_names(tree)}


def _shown(tree: PyTree) -> str:
    named = [f"{name or 'an array'} {list(shape)}" for name, shape in _shapes(tree).items()]
    return some_of(named, 3)


def keeps_average(rule: optax.GradientTransformationExtraArgs, params: Params) -> bool:
    """Return whether the state seems to hold an average of the parameters.

    An average begins as a copy of the parameters, and changes. Nothing is computed, because the
    function only inspects the traces of init and update. A copy that never changes (the initial
    parameters, from which `optax.contrib.dog` measures a distance) is not an average.

    >>> keeps_average(optax.with_extra_args_support(optax.adam(1e-3)), {"w": jnp.ones(3)})
    False
    """
    begun = jax.make_jaxpr(rule.init)(params)
    state, number = jax.eval_shape(rule.init, params), jax.ShapeDtypeStruct((), jnp.float32)

    def update(grads: Params, state: OptState, params: Params, number: jax.Array) -> OptState:
        return rule.update(grads, state, params, grad_norm=number, value=number)[1]

    step = jax.make_jaxpr(update)(params, state, params, number)
    count, origins = len(jax.tree.leaves(params)), _origins(begun.jaxpr)
    copies = [isinstance(var, Var) and var in origins for var in begun.jaxpr.outvars]
    moved = [
        new is not old
        # `zip` stops at the end of the state. The arguments after the state are not compared.
        for new, old in zip(step.jaxpr.outvars, step.jaxpr.invars[count:], strict=False)
    ]
    return sum(c and m for c, m in zip(copies, moved, strict=True)) >= count


def _origins(jaxpr: Jaxpr) -> set[Var]:
    """Return the variables of a trace that are arguments, or copies of arguments."""
    same = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        called = (
            equation.params.get("jaxpr") if equation.primitive.name in ("jit", "pjit") else None
        )
        given = [not isinstance(var, Literal) and var in same for var in equation.invars]
        if called is not None:
            inner = _origins(getattr(called, "jaxpr", called))
            outs = [var in inner for var in getattr(called, "jaxpr", called).outvars]
            same.update(
                v for v, out in zip(equation.outvars, outs, strict=True) if out and all(given)
            )
        elif equation.primitive.name in _SAME and all(given):
            same.update(equation.outvars)
    return same
