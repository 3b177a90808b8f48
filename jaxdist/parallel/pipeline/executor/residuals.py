"""What a forward pass leaves to its backward pass, as a list of arrays that a buffer can hold.

Of what `jax.vjp` keeps, only that is listed which depends on the chunk's input. Parameters, what
is derived from them alone, masks and random keys are had again from where they are, at no memory
for each microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxdist.parallel.pipeline.split_backward.jaxprs import depends_on

Blocks = Callable[[Any, Any, Any], Any]
"""(parameters of a chunk, x, visit) to a new x of the same structure."""
Pull = Callable[[Any], tuple[Any, Any]]
"""Gradient of the output to gradients of (parameters, input)."""


@dataclass(frozen=True)
class Residuals:
    """The residuals of one function, the same for all chunks.

    Attributes:
      x: shapes of the input.
      traced: (params, visit, x) to the output and the leaves of the function that `jax.vjp`
        returns, flat. Both passes run this one trace: another might have other leaves, since jax
        leaves out some that are equal, as it happens.
      y, pull: structures of the output, and of that function.
      listed: for each leaf of it, whether it is listed.
      shapes: of those that are.
    """

    x: Any
    traced: ClosedJaxpr
    y: Any
    pull: Any
    listed: tuple[bool, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def forward(self, params: Any, visit: Any, x: Any) -> tuple[Any, list[jax.Array]]:
        """The output, and the residuals."""
        y, leaves = self._run(params, visit, x)
        own = [leaf for leaf, own in zip(leaves, self.listed, strict=True) if own]
        return jax.tree.unflatten(self.y, y), own

    def backward(self, params: Any, visit: Any, residuals: Sequence[jax.Array]) -> Pull:
        """The backward pass from its residuals."""
        # Nothing below depends on these zeros once the residuals are put in, so that the compiler
        # drops the forward pass of them.
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.x)
        leaves, found = self._run(params, visit, zeros)[1], iter(residuals)
        return jax.tree.unflatten(
            self.pull,
            [next(found) if own else leaf for leaf, own in zip(leaves, self.listed, strict=True)],
        )

    def _run(self, params: Any, visit: Any, x: Any) -> tuple[list[Any], list[Any]]:
        """The leaves of the output, and those of the function."""
        found = jaxpr_as_fun(self.traced)(*jax.tree.leaves((params, visit, x)))
        count = self.y.num_leaves
        return found[:count], found[count:]


def find_residuals(blocks: Blocks, params: Any, visit: Any, x: Any) -> Residuals:
    """The residuals of `blocks`, found by tracing it.

    Args:
      params, visit, x: arguments, or their shapes.
    """

    def vjp(params: Any, visit: Any, x: Any) -> tuple[Any, Pull]:
        return jax.vjp(lambda params, x: blocks(params, x, visit), params, x)

    traced, (y, pull) = jax.make_jaxpr(vjp, return_shape=True)(params, visit, x)
    given, count = len(jax.tree.leaves((params, visit))), len(jax.tree.leaves(y))
    inputs = [i >= given for i in range(len(traced.jaxpr.invars))]
    listed = tuple(depends_on(traced.jaxpr, inputs)[count:])
    shapes = zip(jax.tree.leaves(pull), listed, strict=True)
    x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x)
    return Residuals(
        x,
        traced,
        jax.tree.structure(y),
        jax.tree.structure(pull),
        listed,
        tuple(shape for shape, keep in shapes if keep),
    )
