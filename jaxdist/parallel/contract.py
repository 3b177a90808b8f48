"""The protocols of the parts of a train step: `Compute` and `Exchange`, with their data types.

A step is `Objective` -> `Compute` -> `Exchange` -> optimizer. To compute gradients by a new method,
write a class that implements `Compute`. To reduce gradients by a new method, write a class that
implements `Exchange`. `train/step.py` does not change.
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
    """The results of the forward and backward passes over a batch.

    Attributes:
      grads: the gradients, a tree like the trained parameters. A method that returns `Gradients`
        documents whether these are gradients of the total loss or of the mean loss.
      sums: the totals and weights of the loss and its metrics.
      buffers: the model's buffers after the pass.
    """

    grads: Grads
    sums: Sums
    buffers: Buffers


class StepInputs(NamedTuple):
    """The inputs of a step.

    Attributes:
      params: the parameters with the shapes that the model and the optimizer see.
      stored: the parameters as devices store them. ZeRO pads a dim with zeros if the number of
        shards does not divide its length.
      buffers: the model's buffers before the step.
      scale: the state of the loss scale, or None without a loss scale.
      batch: the whole batch, or a device's rows in a `jax.shard_map` over the axes of the batch.
      key: the random key of the step.
    """

    params: Params
    stored: Params
    buffers: Buffers
    scale: LossScaleState | None
    batch: Batch
    key: jax.Array


@dataclass(frozen=True)
class BatchContext:
    """The context in which gradients are computed: on one global batch, or on a device's rows.

    Attributes:
      axes: the manual mesh axes that split the rows of the batch, or () if the batch is one global
        array that XLA partitions.
      statistics_over: the axes over which a BatchNorm calls collectives to average its statistics.
      placed: the function that sets the shardings of each microbatch's gradients, before the
        gradients are added up.
    """

    axes: tuple[str, ...] = ()
    statistics_over: tuple[str, ...] = ()
    placed: Callable[[PyTree], PyTree] = lambda grads: grads


class Compute(Protocol):
    """The computation of gradients from a batch, on the devices that hold the batch's rows.

    Attributes:
      microbatches: the number of microbatches into which a batch is divided.
      explicit: whether the computation calls collectives explicitly. Otherwise XLA inserts all
        collectives.
    """

    @property
    def microbatches(self) -> int: ...
    @property
    def explicit(self) -> bool: ...

    def gradients(self, held: StepInputs, around: BatchContext) -> Gradients:
        """Compute gradients of the total loss of `held.batch`, summed over microbatches.

        Args:
          held: the inputs. The batch has a device's rows if `around.axes` is not empty.
          around: the context, which says how the batch is split.
        """
        ...

    def mean_gradients(self, held: StepInputs, around: BatchContext) -> Gradients:
        """Compute gradients of the mean loss of `held.batch`, which must be the whole batch."""
        ...

    def sums(self, params: Params, buffers: Buffers, batch: Batch) -> Sums:
        """Compute the sums of the loss and its metrics in evaluation mode."""
        ...

    def resized(self, microbatches: int) -> Compute:
        """Return this computation with the given number of microbatches."""
        ...


class Placements(NamedTuple):
    """The shardings of the parameters, between steps and during the optimizer's update.

    Attributes:
      params: the shardings of the stored parameters.
      shares: the shardings of gradients, moments and new parameters during the optimizer's update,
        a tree like the trained parameters.
    """

    params: Params
    shares: Shardings


Given = Sequence[tuple[PyTree, PyTree]]
"""Pairs of a tree and a second tree of the same structure. For each leaf of the first tree, the
second tree has the `jaxdist.optim.owners.Owner`, or None if the leaf belongs to no parameter."""


class Exchange(Protocol):
    """The exchange that sums the gradients of all devices and distributes the new parameters.

    Each device gets its share of the summed gradients: a shard with ZeRO, otherwise all gradients.
    A step passes `state` (for example residuals) to the next step as a part of the training state.
    The state of an exchange without residuals is `()`.

    Attributes:
      zero: the split of the training state over replicas; without ZeRO its stage is 0.
      explicit: whether the exchange calls collectives explicitly. Otherwise XLA inserts all
        collectives.
      keeps_barriers: whether XLA must keep optimization barriers, because otherwise the replicas of
        the parameters could differ in their last bits.
      placements: the shardings of the parameters between steps and during the update.
    """

    @property
    def zero(self) -> ZeroSplit: ...
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
        """Return the exchange's state before the first step."""
        ...

    def state_shardings(self, state: PyTree) -> PyTree:
        """Return the sharding of each leaf of a state; the leaves are arrays or shapes."""
        ...

    def reshard(self, saved: PyTree, state: PyTree) -> PyTree:
        """Convert a state that was saved under another plan to the form of this plan.

        Args:
          saved: the saved arrays, a tree with the structure of `state` whose leaves may have other
            shapes.
          state: the shapes of this plan's state.

        Raises:
          CompressionError: no conversion is sound, so the state must be initialized again.
        """
        ...

    def gradients(self, compute: Compute, held: StepInputs, state: PyTree) -> tuple[Gradients, Any]:
        """Compute gradients of the mean loss of the whole batch, and the exchange's next state.

        `held` has the whole batch. `state` is the state of the exchange after the previous step.
        """
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
        """Apply a function, such as an optimizer's update, to trees like the parameters.

        Args:
          function: the function, which is called with the trees of `given` and then with `rest`.
            The n trees that it returns have the structures and shardings of the last n trees of
            `given`.
          given: each tree with the owners of its leaves. A leaf has the sharding that
            `placements.shares` has for the owner of the leaf.
          rest: the arguments after `given`, which are equal on all devices.

        Returns:
          The trees that `function` returns.
        """
        ...

    def norm(self, grads: Grads) -> jax.Array:
        """Compute the global norm, in float32, of gradients that `shares` returned."""
        ...

    def publish(self, params: Params, into: Params) -> PyTree:
        """Return new parameters with the shardings of `placements.params`.

        Args:
          params: the new parameters with the shardings of `placements.shares`.
          into: the old parameters. If the old parameters are donated, the new parameters use the
            same memory.
        """
        ...
