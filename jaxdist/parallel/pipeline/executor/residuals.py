"""Residuals: the values that a forward pass leaves to its backward pass, as arrays for a buffer.

`jax.vjp` keeps more than must be stored for every microbatch. Only what depends on the chunk's
input is stored; parameters, what follows from them alone, masks and random keys are still there, or
are computed again, in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxdist.parallel.pipeline.executor.model_fns import Activation, Visit
from jaxdist.parallel.pipeline.split_backward.jaxprs import depends_on
from jaxdist.types import Grads, Params, PyTree, TreeDef

ChunkFn = Callable[[Params, Activation, Visit], Activation]
"""Function from (parameters of a chunk, x, visit) to a new x of the same structure."""
BackwardFn = Callable[[Activation], tuple[Grads, Activation]]
"""Function from the gradient of the output to those of (parameters, input)."""


@dataclass(frozen=True)
class Residuals:
    """The residuals of a function, the same for all chunks.

    Attributes:
      x: shapes of the input.
      traced: function from (params, visit, x) to the output and the leaves of the backward function
        that `jax.vjp` returns (it is a pytree), flat. Both passes run this same trace: a second
        trace might have other leaves, since jax merges some equal leaves, but not always the same.
      y: structure of the output.
      pull: structure of the backward function.
      listed: for each leaf of the backward function, whether it is stored.
      shapes: shapes of the stored leaves.
    """

    x: PyTree
    traced: ClosedJaxpr
    y: TreeDef
    pull: TreeDef
    listed: tuple[bool, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def forward(
        self, params: Params, visit: Visit, x: Activation
    ) -> tuple[Activation, list[jax.Array]]:
        """Return the output, and the residuals to store."""
        y, leaves = self._run(params, visit, x)
        own = [leaf for leaf, own in zip(leaves, self.listed, strict=True) if own]
        return jax.tree.unflatten(self.y, y), own

    def backward(self, params: Params, visit: Visit, residuals: Sequence[jax.Array]) -> BackwardFn:
        """Return the backward function with the stored residuals inserted."""
        # This looks like a forward pass of zeros, but XLA removes it: every leaf that depends on
        # the input is replaced by its residual. What remains computes leaves from the parameters.
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.x)
        leaves, found = self._run(params, visit, zeros)[1], iter(residuals)
        return jax.tree.unflatten(
            self.pull,
            [next(found) if own else leaf for leaf, own in zip(leaves, self.listed, strict=True)],
        )

    def _run(
        self, params: Params, visit: Visit, x: Activation
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the leaves of the output, and those of the backward function."""
        found = jaxpr_as_fun(self.traced)(*jax.tree.leaves((params, visit, x)))
        count = self.y.num_leaves
        return found[:count], found[count:]


def find_residuals(blocks: ChunkFn, params: Params, visit: Visit, x: Activation) -> Residuals:
    """Find the residuals of `blocks`, by tracing it once.

    Args:
      params, visit, x: arguments, or their shapes.
    """

    def vjp(params: Params, visit: Visit, x: Activation) -> tuple[Activation, BackwardFn]:
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
