"""Residuals: the arrays that a forward pass stores in a buffer for its backward pass.

`jax.vjp` keeps more values than must be stored for every microbatch. Only values that depend on the
chunk's input are stored. The backward pass still has the parameters and random keys, and recomputes
masks and other values that depend only on these.
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
"""A function from (parameters of a chunk, x, visit) to a new x of the same structure."""
BackwardFn = Callable[[Activation], tuple[Grads, Activation]]
"""A function from the gradient of the output to the gradients of (parameters, input)."""


@dataclass(frozen=True)
class Residuals:
    """The residuals of a chunk's function, which is the same for all chunks.

    Attributes:
      x: shapes of the input.
      traced: function from (params, visit, x) to the output and the backward function of `jax.vjp`,
        which is a pytree, both as flat leaves. Both passes run this same trace: a second trace
        might have other leaves, since jax merges some equal leaves, but not always the same leaves.
      y: structure of the output.
      pull: structure of the backward function.
      listed: for each leaf of the backward function, whether it is a residual to store.
      shapes: shapes of the stored residuals.
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
        # XLA removes most of this forward pass on zeros, because every leaf that depends on the
        # input is replaced by its residual. Only the computation of other leaves, from parameters
        # and visit, remains.
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.x)
        leaves, found = self._run(params, visit, zeros)[1], iter(residuals)
        return jax.tree.unflatten(
            self.pull,
            [next(found) if own else leaf for leaf, own in zip(leaves, self.listed, strict=True)],
        )

    def _run(
        self, params: Params, visit: Visit, x: Activation
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Run the trace; return the leaves of the output, then those of the backward function."""
        found = jaxpr_as_fun(self.traced)(*jax.tree.leaves((params, visit, x)))
        count = self.y.num_leaves
        return found[:count], found[count:]


def find_residuals(blocks: ChunkFn, params: Params, visit: Visit, x: Activation) -> Residuals:
    """Find the residuals of the function `blocks` in a single trace.

    Args:
      params, visit, x: arguments of `blocks`, or their shapes.
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
