"""The computation of the gradients of a batch, in a single pass or in a pass for each microbatch.

`jaxdist.parallel.pipeline.model.pipeline.Pipeline` instead computes gradients on pipeline stages.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.models.loss import Batch, Sums
from jaxdist.models.mean import check_adds_up, divisor
from jaxdist.parallel.contract import BatchContext, Compute, Gradients, StepInputs
from jaxdist.parallel.microbatch import split_rows
from jaxdist.parallel.objective import Objective
from jaxdist.sharding import Layout
from jaxdist.trees import wide
from jaxdist.types import Buffers, Params, PyTree


@dataclass(frozen=True)
class Unstaged:
    """The base class of computations without pipeline stages: every device runs all layers.

    Evaluation computes a whole batch at once, for any number of microbatches.
    """

    objective: Objective
    layout: Layout
    explicit: bool = field(default=False, init=False)

    def sums(self, params: Params, buffers: Buffers, batch: Batch) -> Sums:
        return self.objective.sums(params, buffers, batch, None)[1][0]

    def resized(self, microbatches: int) -> Compute:
        return whole_or_accumulated(self.objective, self.layout, microbatches)


@dataclass(frozen=True)
class WholeBatch(Unstaged):
    """The computation of gradients in a single pass over the whole batch."""

    microbatches: int = field(default=1, init=False)

    def gradients(self, held: StepInputs, around: BatchContext) -> Gradients:
        return self.objective.total_gradients(held, around)

    def mean_gradients(self, held: StepInputs, around: BatchContext) -> Gradients:
        return self.objective.mean_gradients(held, around)


@dataclass(frozen=True)
class Accumulated(Unstaged):
    """The computation of gradients by one pass for each microbatch, in sequence.

    The gradients of the microbatches are added up in float32 or wider.
    """

    microbatches: int

    def gradients(self, held: StepInputs, around: BatchContext) -> Gradients:
        pieces = split_rows(dict(held.batch), self.microbatches, self.layout)
        # With a common key, dropout would drop the same units in all microbatches.
        keys = jax.random.split(held.key, self.microbatches)

        def one(buffers: Buffers, rows: PyTree, key: jax.Array) -> Gradients:
            given = held._replace(buffers=buffers, batch=rows, key=key)
            found = self.objective.total_gradients(given, around)
            # With a loss scale the gradients are in float32 already.
            return found if held.scale is not None else found._replace(grads=wide(found.grads))

        def body(carry: Gradients, piece: tuple[Any, Any]) -> tuple[Gradients, None]:
            grads, more, buffers = one(carry.buffers, *piece)
            total, sums = jax.tree.map(jnp.add, (carry.grads, carry.sums), (grads, more))
            return Gradients(total, sums, buffers), None

        rows, first = jax.tree.map(lambda x: x[0], (pieces, keys))
        # The sums have the dtypes of a microbatch's results, which are found by tracing.
        shapes = jax.eval_shape(one, held.buffers, rows, first)
        check_adds_up(shapes.sums, f"the batch is computed in {self.microbatches} microbatches")
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes[:2])
        begun = Gradients(zeros[0], zeros[1], held.buffers)
        # A scan keeps the activations of only one microbatch in memory at a time.
        return jax.lax.scan(body, begun, (pieces, keys))[0]

    def mean_gradients(self, held: StepInputs, around: BatchContext) -> Gradients:
        return over_weight(self.gradients(held, around))


def whole_or_accumulated(objective: Objective, layout: Layout, microbatches: int) -> Compute:
    """Return the computation of gradients for batches that have `microbatches` parts."""
    if microbatches == 1:
        return WholeBatch(objective, layout)
    return Accumulated(objective, layout, microbatches)


def over_weight(found: Gradients) -> Gradients:
    """Convert gradients of the total loss to gradients of the mean loss."""
    weight = divisor(found.sums["loss"].weight)
    return found._replace(grads=jax.tree.map(lambda g: g / weight, found.grads))
