"""The contracts of a train step: what computes gradients, and what exchanges them.

A step is `Objective` -> `Compute` -> `Exchange` -> optimizer. A new way to compute is a new file
that implements `Compute`, a new way to reduce one that implements `Exchange`; `train/step.py` does
not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax

from jaxdist.models.loss import Batch, Sums
from jaxdist.optim.loss_scale import LossScaleState
from jaxdist.parallel.zero import Zero
from jaxdist.types import Buffers, Grads, Params, PyTree, Shardings


class Gradients(NamedTuple):
    """What a pass over a batch finds.

    Attributes:
      grads: of the total or of the mean loss, a tree like the parameters.
      sums: everything that the loss measures, with its weights.
      buffers: the model's buffers after the pass.
    """

    grads: Grads
    sums: Sums
    buffers: Buffers


class Held(NamedTuple):
    """What a step computes gradients with.

    Attributes:
      params: as model and optimizer see them.
      stored: as devices hold them: with the zeros that fill up ZeRO's shards.
      scale: the state of the loss scale; None without one.
    """

    params: Params
    stored: Params
    buffers: Buffers
    scale: LossScaleState | None


@dataclass(frozen=True)
class Surroundings:
    """Where gradients are computed: on all rows as one array, or on each device's own rows.

    Attributes:
      axes: manual mesh axes that split the rows; () where XLA sees them as one array.
      statistics_over: of these, the axes over which a BatchNorm averages by itself.
      placed: lays each microbatch's gradients out before they are added up.
    """

    axes: tuple[str, ...] = ()
    statistics_over: tuple[str, ...] = ()
    placed: Callable[[PyTree], PyTree] = lambda grads: grads


class Compute(Protocol):
    """From a batch to gradients, on the devices that hold its rows.

    Attributes:
      microbatches: pieces that the batch is computed in, one after another.
      explicit: whether it names collectives itself.
    """

    @property
    def microbatches(self) -> int: ...
    @property
    def explicit(self) -> bool: ...

    def gradients(
        self, held: Held, batch: Batch, key: jax.Array, around: Surroundings
    ) -> Gradients:
        """Gradients of the total loss of these rows, summed over microbatches; `held.params`."""
        ...

    def mean_gradients(
        self, held: Held, batch: Batch, key: jax.Array, around: Surroundings
    ) -> Gradients:
        """The same of the mean loss, where these are all rows of the batch."""
        ...

    def sums(self, params: Params, buffers: Buffers, batch: Batch) -> Sums:
        """What the loss measures in evaluation mode."""
        ...

    def resized(self, microbatches: int) -> Compute:
        """The same for a batch that is computed in another number of pieces."""
        ...


class Placements(NamedTuple):
    """Shardings of trees like the parameters.

    Attributes:
      params: how they are stored.
      shares: how gradients, moments and new parameters lie where the optimizer computes.
    """

    params: Params
    shares: Shardings


Given = Sequence[tuple[PyTree, PyTree]]
"""Trees, each with the `jaxdist.optim.owners.Owner` of each of its leaves, or None."""


class Exchange(Protocol):
    """From gradients on devices to the share that each one updates, and back to parameters.

    `state` is what it carries from step to step (residuals, say), `()` if nothing: part of the
    train state, saved with it.

    Attributes:
      zero: what each replica keeps only a shard of; None keeps all.
      explicit: whether it names collectives itself.
      keeps_barriers: whether its replicas are only equal to the bit if XLA keeps barriers.
    """

    @property
    def zero(self) -> Zero | None: ...
    @property
    def explicit(self) -> bool: ...
    @property
    def keeps_barriers(self) -> bool: ...
    @property
    def placements(self) -> Placements: ...

    def options(self, platform: str) -> Mapping[str, Any]:
        """What the compiler is told on such devices, so that results are as promised."""
        ...

    def init(self, params: Params) -> PyTree:
        """The state before the first step."""
        ...

    def state_shardings(self, state: PyTree) -> PyTree:
        """Where the leaves of a state lie; `state` may be shapes."""
        ...

    def reshard(self, saved: PyTree, state: PyTree) -> PyTree:
        """A state of this plan from one that another plan saved.

        Args:
          saved: arrays of the same structure, of any shapes.
          state: shapes of this plan's.

        Raises:
          CompressionError: no rule is sound; it then begins anew.
        """
        ...

    def gradients(
        self, compute: Compute, held: Held, batch: Batch, key: jax.Array, state: PyTree
    ) -> tuple[Gradients, Any]:
        """Gradients of the mean loss of the whole batch, and the next state."""
        ...

    def sums(self, compute: Compute, params: Params, buffers: Buffers, batch: Batch) -> Sums:
        """What the loss measures of a whole batch in evaluation mode."""
        ...

    def shares(self, grads: Grads, params: Params) -> tuple[Any, Any]:
        """Gradients and parameters as `placements.shares` has them."""
        ...

    def apply(
        self, function: Callable[..., tuple[Any, ...]], given: Given, rest: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """`function` of trees that belong to parameters, as an update does them.

        Args:
          function: of the trees and of `rest`; it gives new ones in place of the last of them.
          given: each tree with that of its leaves' owners; a leaf lies as its owner's share does.
          rest: the same on all devices.
        """
        ...

    def norm(self, grads: Grads) -> jax.Array:
        """The global norm of gradients that lie as `placements.shares` has them, float32."""
        ...

    def publish(self, params: Params, into: Params) -> PyTree:
        """New parameters, as `placements.params` has them.

        Args:
          params: as `placements.shares` has them.
          into: the old ones; their buffers take the new values where they are donated.
        """
        ...
