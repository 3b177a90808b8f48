"""Residuals: the arrays that the forward pass of a chunk stores for its backward pass.

`jax.vjp` keeps more values than must be stored for each microbatch. Only values that depend on the
chunk's input are stored. The backward pass has the parameters and random keys too, and recomputes
masks and other values that depend only on parameters and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from jaxdist.jaxprs import depends_on
from jaxdist.parallel.pipeline.executor.model_fns import Activation, Visit
from jaxdist.types import Grads, Params, PyTree, TreeDef

ChunkFn = Callable[[Params, Activation, Visit], Activation]
"""A function from (parameters of a chunk, x, visit) to a new x of the same structure."""
BackwardFn = Callable[[Activation], tuple[Grads, Activation]]
"""A function from the gradient of the output to the gradients of (parameters, input)."""


@dataclass(frozen=True)
class Residuals:
    """The forward and backward passes of a chunk's function, which is the same for all chunks.

    The backward function that `jax.vjp` returns is a pytree of arrays. Both passes run the same
    trace. A second trace might have other leaves, because jax merges some equal leaves, and may
    merge other leaves in the second trace.

    Attributes:
      x: the shapes of the input.
      traced: the trace from the leaves of (params, visit, x) to the leaves of the output, then the
        leaves of the backward function.
      y: the structure of the output.
      pull: the structure of the backward function.
      listed: for each leaf of the backward function, whether it is a residual to store.
      shapes: the shapes of the stored residuals.
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
        """Return the output of a chunk, and the residuals to store."""
        y, leaves = self._run(params, visit, x)
        own = [leaf for leaf, own in zip(leaves, self.listed, strict=True) if own]
        return jax.tree.unflatten(self.y, y), own

    def backward(self, params: Params, visit: Visit, residuals: Sequence[jax.Array]) -> BackwardFn:
        """Return the backward function of `forward`, from the stored residuals."""
        # This forward pass runs on zeros. Every leaf that depends on the input is replaced by its
        # residual, so XLA removes the code that computes it. XLA keeps only the code that computes
        # other leaves, from the parameters and the visit.
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self.x)
        leaves, found = self._run(params, visit, zeros)[1], iter(residuals)
        return jax.tree.unflatten(
            self.pull,
            [next(found) if own else leaf for leaf, own in zip(leaves, self.listed, strict=True)],
        )

    def _run(
        self, params: Params, visit: Visit, x: Activation
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Run the trace, and return the leaves of the output and of the backward function."""
        found = jaxpr_as_fun(self.traced)(*jax.tree.leaves((params, visit, x)))
        count = self.y.num_leaves
        return found[:count], found[count:]


def find_residuals(blocks: ChunkFn, params: Params, visit: Visit, x: Activation) -> Residuals:
    """Trace the function `blocks` once, and find its residuals.

    Args:
      blocks: the function of a chunk.
      params, visit, x: the arguments of `blocks`, or their shapes.
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
