"""The contracts of a train step: computing gradients, and exchanging them.

A step is `Objective` -> `Compute` -> `Exchange` -> optimizer. A new way to compute gradients is a
new class that implements `Compute`, a new way to reduce them is a new class that implements
`Exchange`; `train/step.py` does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from jaxdist.models.loss import Batch, Sums
from jaxdist.optim.loss_scale import LossScaleState
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.types import Buffers, Grads, Params, PyTree, Shardings


class Gradients(NamedTuple):
    """The results of a pass over a batch.

    Attributes:
      grads: gradients of the total or of the mean loss, a tree like the trained parameters.
      sums: totals and weights of the loss and its metrics.
      buffers: the model's buffers after the pass.
    """

    grads: Grads
    sums: Sums
    buffers: Buffers


class StepInputs(NamedTuple):
    """The inputs of a step, besides the batch.

    Attributes:
      params: the parameters with the shapes that the model and the optimizer see.
      stored: the parameters as devices store them, with the zeros that fill up ZeRO's shards.
      scale: the state of the loss scale, or None without a loss scale.
    """

    params: Params
    stored: Params
    buffers: Buffers
    scale: LossScaleState | None


@dataclass(frozen=True)
class BatchContext:
    """The context in which gradients are computed: a batch as one array, or each device's own rows.

    Attributes:
      axes: manual mesh axes that split the rows, or () where XLA sees the rows as one array.
      statistics_over: the axes over which a BatchNorm averages its statistics itself.
      placed: function that lays out each microbatch's gradients before they are added up.
    """

    axes: tuple[str, ...] = ()
    statistics_over: tuple[str, ...] = ()
    placed: Callable[[PyTree], PyTree] = lambda grads: grads


class Compute(Protocol):
    """The computation of gradients from a batch, on the devices that hold its rows.

    Attributes:
      microbatches: number of pieces in which the batch is computed, in sequence.
      explicit: whether the computation calls collectives itself, instead of leaving them to XLA.
    """

    @property
    def microbatches(self) -> int: ...
    @property
    def explicit(self) -> bool: ...

    def gradients(
        self, held: StepInputs, batch: Batch, key: jax.Array, around: BatchContext
    ) -> Gradients:
        """Compute gradients of the total loss of these rows, summed over microbatches."""
        ...

    def mean_gradients(
        self, held: StepInputs, batch: Batch, key: jax.Array, around: BatchContext
    ) -> Gradients:
        """Compute gradients of the mean loss of `batch`, which must be the whole batch."""
        ...

    def sums(self, params: Params, buffers: Buffers, batch: Batch) -> Sums:
        """Compute the sums of the loss and its metrics in evaluation mode."""
        ...

    def resized(self, microbatches: int) -> Compute:
        """Return this computation for a batch in another number of pieces."""
        ...


class Placements(NamedTuple):
    """Shardings of trees like the parameters.

    Attributes:
      params: shardings of the stored parameters.
      shares: shardings of gradients, moments and new parameters during the optimizer's update.
    """

    params: Params
    shares: Shardings


Given = Sequence[tuple[PyTree, PyTree]]
"""Pairs of a tree and a tree with the `jaxdist.optim.owners.Owner`, or None, of each leaf."""


class Exchange(Protocol):
    """The exchange of gradients: it sums devices' gradients, and distributes the new parameters.

    Each device gets its share of the summed gradients. `state` (for example residuals) is passed
    from step to step, and saved with the train state; an exchange without state has `()`.

    Attributes:
      zero: the splitting of the training state over replicas; None splits nothing.
      explicit: whether the exchange calls collectives itself, instead of leaving them to XLA.
      keeps_barriers: whether replicas of the parameters are only equal to the bit if XLA keeps
        barriers.
    """

    @property
    def zero(self) -> ZeroSplit | None: ...
    @property
    def explicit(self) -> bool: ...
    @property
    def keeps_barriers(self) -> bool: ...
    @property
    def placements(self) -> Placements: ...

    def options(self, platform: str) -> Mapping[str, Any]:
        """Return the compiler options that the exchange needs on a platform for correct results."""
        ...

    def init(self, params: Params) -> PyTree:
        """Return the state before the first step."""
        ...

    def state_shardings(self, state: PyTree) -> PyTree:
        """Return the shardings of a state's leaves; `state` may be shapes."""
        ...

    def reshard(self, saved: PyTree, state: PyTree) -> PyTree:
        """Convert a state, which was saved under another plan, to this plan's form.

        Args:
          saved: arrays of the same structure, of any shapes.
          state: shapes of this plan's state.

        Raises:
          CompressionError: no conversion is sound, so the state must be initialized again.
        """
        ...

    def gradients(
        self, compute: Compute, held: StepInputs, batch: Batch, key: jax.Array, state: PyTree
    ) -> tuple[Gradients, Any]:
        """Compute gradients of the mean loss of the whole batch, and the next state."""
        ...

    def sums(self, compute: Compute, params: Params, buffers: Buffers, batch: Batch) -> Sums:
        """Compute the sums of the loss and its metrics over a whole batch in evaluation mode."""
        ...

    def shares(self, grads: Grads, params: Params) -> tuple[Any, Any]:
        """Return gradients and parameters with the shardings of `placements.shares`."""
        ...

    def apply(
        self, function: Callable[..., tuple[Any, ...]], given: Given, rest: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Apply `function`, such as an optimizer's update, to trees like the parameters.

        Args:
          function: function of the trees and of `rest`; the n trees that it returns replace the
            last n of `given`.
          given: each tree with its leaves' owners; a leaf is placed like its owner's share.
          rest: arguments that are equal on all devices.
        """
        ...

    def norm(self, grads: Grads) -> jax.Array:
        """Compute the global norm, in float32, of gradients placed by `placements.shares`."""
        ...

    def publish(self, params: Params, into: Params) -> PyTree:
        """Return new parameters with the shardings of `placements.params`.

        Args:
          params: new parameters with the shardings of `placements.shares`.
          into: the old parameters; if these are donated, the new parameters use their memory.
        """
        ...
