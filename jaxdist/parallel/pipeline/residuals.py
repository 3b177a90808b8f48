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

from jaxdist.parallel.pipeline.jaxprs import depends_on

Blocks = Callable[[Any, Any, Any], Any]
"""(parameters of a chunk, x, visit) to a new x of the same structure."""
Pull = Callable[[Any], tuple[Any, Any]]
"""Gradient of the output to gradients of (parameters, input)."""


@dataclass(frozen=True)
class Residuals:
    """The residuals of one function, the same for all chunks.

    Attributes:
      x: shapes of the input.
      listed: for each leaf of the function that `jax.vjp` returns, whether it is listed.
      shapes: of those that are.
    """

    blocks: Blocks
    x: Any
    listed: tuple[bool, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def forward(self, params: Any, visit: Any, x: Any) -> tuple[Any, list[jax.Array]]:
        """The output, and the residuals."""
        y, pull = self._vjp(params, visit, x)
        leaves = jax.tree.leaves(pull)
        return y, [leaf for leaf, own in zip(leaves, self.listed, strict=True) if own]

    def backward(self, params: Any, visit: Any, residuals: Sequence[jax.Array]) -> Pull:
        """The backward pass from its residuals."""
        # Nothing below depends on these zeros once the residuals are put in, so that the compiler
        # drops the forward pass of them.
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.x)
        leaves, structure = jax.tree.flatten(self._vjp(params, visit, zeros)[1])
        found = iter(residuals)
        return structure.unflatten(
            next(found) if own else leaf for leaf, own in zip(leaves, self.listed, strict=True)
        )

    def _vjp(self, params: Any, visit: Any, x: Any) -> tuple[Any, Pull]:
        return jax.vjp(lambda params, x: self.blocks(params, x, visit), params, x)


def find_residuals(blocks: Blocks, params: Any, visit: Any, x: Any) -> Residuals:
    """The residuals of `blocks`, found by tracing it.

    Args:
      params, visit, x: arguments, or their shapes.
    """

    def leaves(params: Any, visit: Any, x: Any) -> list[jax.Array]:
        return jax.tree.leaves(jax.vjp(lambda p, x: blocks(p, x, visit), params, x)[1])

    closed, shapes = jax.make_jaxpr(leaves, return_shape=True)(params, visit, x)
    given = len(jax.tree.leaves((params, visit)))
    inputs = [i >= given for i in range(len(closed.jaxpr.invars))]
    listed = tuple(depends_on(closed.jaxpr, inputs))
    own = tuple(shape for shape, keep in zip(shapes, listed, strict=True) if keep)
    x = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), x)
    return Residuals(blocks, x, listed, own)
