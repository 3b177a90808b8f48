"""The wrapper that applies an optimizer's rule for single tensors to stacked parameters.

With this wrapper, a transformation has the same effect on a stack of layers as on a list of the
same layers. A rule that depends on a tensor's number of dims, on its norm or on its factors
receives each layer separately, and a rule over all parameters (a global norm) receives all layers.
The state is kept in stacks, with one leaf for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxdist.optim.stacks.form import Layers
from jaxdist.optim.stacks.programs import Call, Function, Listed, choose
from jaxdist.trees import flatten_with_names
from jaxdist.types import OptState, Params, PyTree, Updates


def by_layer(
    transform: optax.GradientTransformationExtraArgs, stacked: Collection[str]
) -> optax.GradientTransformationExtraArgs:
    """Wrap `transform` so that it treats stacked parameters like lists of layers.

    The state has the structure of the state for a single layer, and each leaf that belongs to a
    stack has a leading dim for the layers. The cost depends on the properties that a comparison of
    traces proves for the rule. If every element is updated in the same manner, apart from norms
    over all parameters, there is no cost. If every layer is updated independently, the cost is a
    `jax.vmap`. For any other rule, the length of the program grows with the number of layers.

    Args:
      stacked: the '/'-joined names of the parameters whose first dim counts layers.

    Raises:
      ConfigError: the layers of a stack have results of different structures, shapes or dtypes. The
        error is raised while the update is traced.

    >>> scaled = by_layer(optax.with_extra_args_support(optax.scale_by_trust_ratio()), ["w"])
    >>> grads, params = {"w": jnp.ones((2, 3))}, {"w": jnp.array([[1.0] * 3, [4.0] * 3])}
    >>> scaled.update(grads, scaled.init(params), params)[0]["w"][:, 0].tolist()
    [1.0, 4.0]
    """
    known: dict[Hashable, Call] = {}

    def call(function: Function, listed: Listed, *given: PyTree) -> PyTree:
        given = jax.tree.map(jnp.asarray, given)
        leaves, structure = jax.tree.flatten(given)
        key = (structure, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves))
        if key not in known:
            shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
            known[key] = choose(function, listed, structure.unflatten(shapes))
        return known[key](*given)

    def init(params: Params) -> OptState:
        lists = _listed(params, stacked)
        return call(transform.init, lambda count: (lists(count),), params)

    def update(
        updates: Updates, state: OptState, params: Params = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        grads, own = _listed(updates, stacked), _listed(params, stacked)

        def listed(count: int | None) -> tuple[PyTree, ...]:
            begun = jax.eval_shape(transform.init, (grads if params is None else own)(count))
            return grads(count), begun, own(count), extra

        def run(updates: Updates, state: OptState, params: Params, extra: dict[str, Any]) -> Any:
            return transform.update(updates, state, params, **extra)

        return call(run, listed, updates, state, params, extra)

    return optax.GradientTransformationExtraArgs(init, update) if stacked else transform


def _listed(params: Params, stacked: Collection[str]) -> Callable[[int | None], PyTree]:
    """Return a function from a number of layers to the shapes of the parameters.

    Instead of a stack, the result has a list of the shapes of that number of layers, or of as many
    layers as the stack has if the number is None.
    """
    names = [name for name, _ in flatten_with_names(params)]
    shapes, structure = jax.tree.flatten(jax.eval_shape(lambda: params))

    def listed(count: int | None) -> PyTree:
        return structure.unflatten(
            [
                Layers([_layer_of(x)] * (len(x) if count is None else count)) if n in stacked else x
                for n, x in zip(names, shapes, strict=True)
            ]
        )

    return listed


def _layer_of(stack: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)
