"""A check that the update of each parameter depends on that parameter alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from jaxdist.errors import ConfigError
from jaxdist.jaxprs import depends_on
from jaxdist.optim.build import Rate, build_optimizer
from jaxdist.optim.common import OptimizerConfig
from jaxdist.trees import flatten_with_names
from jaxdist.types import Dims, OptState, Params, Scalar, Updates


def server_transform(
    optim: OptimizerConfig, schedule: optax.Schedule, params: Params, dims: Mapping[str, Dims]
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer as servers use it, without the guard against values that are not finite.

    Args:
      params: the parameters of a model, all or some, or their shapes.
      dims: the logical dims of each parameter, by name.
    """
    # `skip_nonfinite` is turned off, since it reads the gradients of all parameters, and a server
    # has only the gradients of its shard.
    plain = optim.model_copy(update={"skip_nonfinite": False, "max_skipped": None})
    rate = Rate(schedule)
    return build_optimizer(plain, params=params, dims=dims, rate=rate).transform


def check_separable(transform: optax.GradientTransformationExtraArgs, params: Params) -> None:
    """Refuse a transformation that cannot update parameters separately.

    Nothing is computed; the dependences of each update are read from the traced program.

    Args:
      params: all parameters, or their shapes.

    Raises:
      ConfigError: an update depends on another parameter's gradient, value or state, on the
        gradients' global norm, or on the loss.
    """
    names = [name for name, _ in flatten_with_names(params)]
    for half in _halves(len(names)):
        moved = _moved_by(transform, params, half)
        wrong = [at for at in range(len(names)) if moved[at] and at not in half]
        if wrong:
            what = "other parameters" if half else "the global norm or the loss"
            raise ConfigError(
                f"the update of {names[wrong[0]]} depends on {what}, which the server of this "
                "parameter does not have. Use an optimizer that updates one tensor at a time "
                "(sgd, adamw, lars, lamb with max_grad_norm: off)"
            )


def _halves(count: int) -> list[frozenset[int]]:
    """Return the empty set, and sets of numbers below `count` that separate any two numbers.

    For any two numbers, at least one of the sets contains the first number and not the second
    number.
    """
    found = [frozenset[int]()]
    for bit in range(max(count - 1, 0).bit_length()):
        one = frozenset(at for at in range(count) if at >> bit & 1)
        found += [one, frozenset(range(count)) - one]
    return found


def _moved_by(
    transform: optax.GradientTransformationExtraArgs, params: Params, half: frozenset[int]
) -> list[bool]:
    """Return for each parameter whether its update may depend on the parameters in `half`.

    The result is also true if the update may depend on the gradients' norm or on the loss.
    """
    leaves, structure = jax.tree.flatten(params)
    shapes = jax.tree.unflatten(
        structure, [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    )
    number = jax.ShapeDtypeStruct((), jnp.float32)
    state = jax.eval_shape(transform.init, shapes)

    def update(
        grads: Updates, state: OptState, params: Params, norm: Scalar, value: Scalar
    ) -> tuple[Updates, OptState]:
        return transform.update(grads, state, params, grad_norm=norm, value=value)

    mine = [at in half for at in range(len(leaves))]
    begun = jax.make_jaxpr(transform.init)(shapes)
    carried: Sequence[bool] = depends_on(begun.jaxpr, mine)
    step = jax.make_jaxpr(update)(shapes, state, shapes, number, number)
    # Through the optimizer's state, an update may depend on parameters that only an earlier update
    # has read. The step is therefore examined again until no further leaf of the state is found to
    # depend on the parameters in `half`.
    while True:
        found = depends_on(step.jaxpr, [*mine, *carried, *mine, True, True])
        more = [a or b for a, b in zip(carried, found[len(leaves) :], strict=True)]
        if more == list(carried):
            return found[: len(leaves)]
        carried = more
