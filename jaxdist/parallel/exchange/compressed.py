"""The exchanges that send gradients as messages of a codec, with error feedback.

Messages are sent over all axes of the batch, or only over the slow network if the data axis is
split over two networks. If messages cross only the slow network, gradients are first summed without
compression inside the fast network, and each device sends only its shard of the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxdist.collectives.axis import axis_size, rank
from jaxdist.collectives.split import gather_leaves
from jaxdist.parallel.contract import Compute, Gradients, StepInputs
from jaxdist.parallel.exchange.all_reduce import AllReduce
from jaxdist.parallel.exchange.explicit import Explicit, together, with_leading_dim
from jaxdist.parallel.exchange.messages import Messages
from jaxdist.parallel.exchange.scatter import Scatter
from jaxdist.parallel.exchange.unsharded import Unsharded
from jaxdist.parallel.wire import ZeroMessages
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.trees import change_some
from jaxdist.types import Grads, Params, PyTree, Specs


@dataclass(frozen=True)
class Compressed(Explicit):
    """The base class of compressed exchanges.

    Attributes:
      messages: the all-reduce that sends the gradients as messages. Its state is the state of the
        exchange.
      inside: the split of tensors over the axes over which gradients are summed without compression
        before messages are sent; its stage is 0 if messages are sent over all axes.
    """

    messages: Messages = field(kw_only=True)
    inside: ZeroSplit = field(kw_only=True)

    def init(self, params: Params) -> PyTree:
        return self.messages.init()

    def state_shardings(self, state: PyTree) -> PyTree:
        return self.messages.shardings(state)

    def reshard(self, saved: PyTree, state: PyTree) -> PyTree:
        return self.messages.reshard(saved, state)

    def averaged(
        self, found: Gradients, specs: Specs, state: PyTree, **ways: Callable[[Any], Any]
    ) -> tuple[Gradients, Any]:
        """Return the mean gradients, and the next state.

        Args:
          found: the gradients of each device, as in `Messages.exchange`.
          specs: the partition specs of these gradients.
          state: the state after the previous step.
          ways: the arguments `before` and `after` of `Messages.exchange`.
        """
        weight, out_specs = found.sums["loss"].weight, self.zero.specs(self.specs)
        given = found.grads, specs, weight, state
        grads, state = self.messages.exchange(*given, out_specs=out_specs, **ways)
        return found._replace(grads=self.zero.cut(grads)), state

    def summed_inside(self, grads: Grads, *, scatter: bool = True) -> PyTree:
        """Sum gradients without compression over the axes of `inside`.

        Args:
          grads: a device's gradients.
          scatter: whether to reduce-scatter the tensors that `inside` splits. The argument must be
            false if `grads` already has the device's shards of the sums of these tensors.

        Returns:
          The device's shard of each sum whose tensor `inside` splits, and the whole sum of each
          other tensor.
        """
        axes, dims = self.inside.axes, self.inside.dims_of(grads)
        leaves, structure = jax.tree.flatten(grads)
        if scatter:
            wire = ZeroMessages(axes, self.algorithm, reduce_dtype=self.reduce_dtype)
            leaves = together(wire.scatter, leaves, dims)
        whole = [i for i, dim in enumerate(dims) if dim is None]
        return structure.unflatten(change_some(partial(self.sum, axes=axes), leaves, whole))


@dataclass(frozen=True)
class CompressedAllReduce(Compressed, AllReduce):
    """The exchange by a compressed all-reduce: every device gets the sum of all gradients."""

    def gradients(self, compute: Compute, held: StepInputs, state: PyTree) -> tuple[Gradients, Any]:
        ways: dict[str, Any] = {"before": self.summed_inside, "after": self._gathered}
        ways = ways if self.inside.stage else {}
        return self.averaged(self.stacked(compute, held), self.stacked_specs(), state, **ways)

    def _gathered(self, shards: Grads) -> PyTree:
        """Gather those tensors of `shards` that are split, and return the others unchanged."""
        leaves, structure = jax.tree.flatten(shards)
        dims, lengths = self.inside.dims_of(shards), self.inside.lengths_of(shards)
        cut = [n for n, dim in zip(lengths, dims, strict=True) if dim is not None]
        settings = {"axis": self.inside.axes, "lengths": cut, "algorithm": self.algorithm}
        return structure.unflatten(together(partial(gather_leaves, **settings), leaves, dims))


@dataclass(frozen=True)
class CompressedScatter(Compressed, Scatter):
    """The compressed exchange that gives each device its shard of the sums (ZeRO 1)."""

    def gradients(self, compute: Compute, held: StepInputs, state: PyTree) -> tuple[Gradients, Any]:
        ways: dict[str, Any] = {"before": self.summed_inside}
        if self.messages.axes == self.axes:
            # Messages across all axes give every device the whole sum. Each device then takes its
            # shard of the sum.
            ways = {"after": partial(_own_shards, self.zero)}
        return self.averaged(self.stacked(compute, held), self.stacked_specs(), state, **ways)


def _own_shards(zero: ZeroSplit, whole: Grads) -> PyTree:
    count, mine = axis_size(zero.axes), rank(zero.axes)

    def own(x: jax.Array, dim: int | None) -> jax.Array:
        if dim is None:
            return x
        length = x.shape[dim] // count
        return jax.lax.dynamic_slice_in_dim(x, mine * length, length, dim)

    return zero.map(own, zero.filled(whole))


@dataclass(frozen=True)
class CompressedUnsharded(Compressed, Unsharded):
    """The exchange with ZeRO 2 or 3 that compresses only messages over the slow network.

    Each layer's gradients are reduce-scattered inside the fast network during the backward pass.
    Messages are sent over the slow network after the backward pass, once per step. A device's
    residual is therefore only as large as the device's shard.
    """

    def gradients(self, compute: Compute, held: StepInputs, state: PyTree) -> tuple[Gradients, Any]:
        specs = self._unsummed(self.trained(self.shard_specs(held.stored)))
        given = {"enter": self.deferred, "leave": with_leading_dim, "grads_specs": specs}
        found = self.on_rows(compute, held, **given)
        summed = partial(self.summed_inside, scatter=False)
        specs = self._unsummed(self.zero.specs(self.specs))
        return self.averaged(found, specs, state, before=summed)

    def _unsummed(self, specs: PyTree) -> PyTree:
        """Add to each spec a first dim that is split over the axes that are not summed yet.

        A leaf that ZeRO does not split is to be summed over all axes of the batch. A leaf that ZeRO
        splits is already summed over ZeRO's axes, and is to be summed over the other axes of the
        batch.
        """
        others = tuple(axis for axis in self.axes if axis not in self.zero.axes)

        def leading(spec: PartitionSpec, dim: int | None) -> PartitionSpec:
            return PartitionSpec(self.axes if dim is None else others, *spec)

        return self.zero.map(leading, specs)
