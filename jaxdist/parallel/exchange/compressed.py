"""The exchanges that send gradients as messages of a codec, with error feedback.

Messages are sent over all axes of the batch, or only over the slow network if the data axis is
split over two networks. If messages cross only the slow network, gradients are first summed without
compression inside the fast network, and each device sends only its shard of the sums.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxdist.collectives.axis import axis_size, rank
from jaxdist.collectives.split import gather_leaves
from jaxdist.models.loss import Batch
from jaxdist.parallel.contract import Compute, Exchange, Gradients, StepInputs
from jaxdist.parallel.exchange.all_reduce import AllReduce
from jaxdist.parallel.exchange.explicit import EVERYWHERE, Explicit, together
from jaxdist.parallel.exchange.messages import Messages
from jaxdist.parallel.exchange.scatter import Scatter
from jaxdist.parallel.exchange.unsharded import Unsharded
from jaxdist.parallel.wire import ZeroMessages
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.types import Grads, Params, PyTree


@dataclass(frozen=True)
class Compressed(Explicit):
    """The base class of compressed exchanges.

    Attributes:
      messages: the all-reduce that sends the gradients as messages. Its state is the state of the
        exchange.
    """

    messages: Messages = field(kw_only=True)

    def init(self, params: Params) -> PyTree:
        return self.messages.init()

    def state_shardings(self, state: PyTree) -> PyTree:
        return self.messages.shardings(state)

    def reshard(self, saved: PyTree, state: PyTree) -> PyTree:
        return self.messages.reshard(saved, state)

    def stacked_specs(self) -> PyTree:
        """Return the partition specs, over all axes, of the gradients that `stacked` returns."""
        return jax.tree.map(lambda spec: PartitionSpec(self.axes, *spec), self.specs)

    def summed_inside(self, zero: ZeroSplit, grads: Grads, *, scatter: bool = True) -> PyTree:
        """Sum gradients without compression over the axes of `zero`.

        Args:
          zero: the split of tensors, and the axes to sum over.
          grads: a device's gradients.
          scatter: whether to reduce-scatter the tensors that `zero` splits. The argument must be
            false if `grads` already has the device's shards of the sums of these tensors.

        Returns:
          The device's shard of each sum whose tensor `zero` splits, and the whole sum of each
          other tensor.
        """
        leaves, structure = jax.tree.flatten(grads)
        dims = zero.dims_of(grads)
        if scatter:
            wire = ZeroMessages(zero.axes, self.algorithm, reduce_dtype=self.reduce_dtype)
            leaves = together(wire.scatter, leaves, dims)
        whole = [i for i, dim in enumerate(dims) if dim is None]
        sums = self.sum([leaves[i] for i in whole], zero.axes) if whole else []
        for i, total in zip(whole, sums, strict=True):
            leaves[i] = total
        return structure.unflatten(leaves)


@dataclass(frozen=True)
class CompressedAllReduce(Compressed, AllReduce):
    """The exchange by a compressed all-reduce: every device gets the sum of all gradients.

    Attributes:
      inside: the split of tensors over the fast network while messages are sent over the slow
        network, or None if messages are sent over all axes.
    """

    inside: ZeroSplit | None = field(default=None, kw_only=True)

    def gradients(
        self, compute: Compute, held: StepInputs, batch: Batch, key: jax.Array, state: PyTree
    ) -> tuple[Gradients, Any]:
        found = self.stacked(compute, held, batch, key)
        ways: dict[str, Any] = {}
        if self.inside is not None:
            ways["before"] = partial(self.summed_inside, self.inside)
            ways["after"] = partial(_gathered, self.inside, found.grads, self)
        grads, state = self.messages.exchange(
            found.grads,
            self.stacked_specs(),
            found.sums["loss"].weight,
            state,
            out_specs=self.specs,
            **ways,
        )
        return found._replace(grads=grads), state


def _gathered(zero: ZeroSplit, like: Grads, exchange: Explicit, shards: Grads) -> PyTree:
    """Gather those tensors of `shards` that `zero` splits, and return the others unchanged."""
    leaves, structure = jax.tree.flatten(shards)
    dims, lengths = zero.dims_of(shards), zero.lengths_of(shards)
    cut = [n for n, dim in zip(lengths, dims, strict=True) if dim is not None]
    gather = partial(gather_leaves, axis=zero.axes, lengths=cut, algorithm=exchange.algorithm)
    return structure.unflatten(together(gather, leaves, dims))


@dataclass(frozen=True)
class CompressedScatter(Compressed, Scatter):
    """The compressed exchange that gives each device its shard of the sums (ZeRO 1)."""

    def gradients(
        self, compute: Compute, held: StepInputs, batch: Batch, key: jax.Array, state: PyTree
    ) -> tuple[Gradients, Any]:
        found = self.stacked(compute, held, batch, key)
        ways: dict[str, Any] = {"before": partial(self.summed_inside, self.zero)}
        if self.messages.axes == self.axes:
            # Messages across all axes give every device the whole sum. Each device then takes its
            # shard of the sum.
            ways = {"after": partial(_own_shards, self.zero)}
        grads, state = self.messages.exchange(
            found.grads,
            self.stacked_specs(),
            found.sums["loss"].weight,
            state,
            out_specs=self.zero.specs(self.specs),
            **ways,
        )
        return found._replace(grads=self.zero.cut(grads)), state


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

    def gradients(
        self, compute: Compute, held: StepInputs, batch: Batch, key: jax.Array, state: PyTree
    ) -> tuple[Gradients, Any]:
        zero = self.zero
        shards = zero.specs(jax.tree.map(lambda _: EVERYWHERE, held.stored))
        found = self.on_rows(
            compute,
            held,
            batch,
            key,
            enter=self._deferred,
            leave=lambda grads: jax.tree.map(lambda g: g[None], grads),
            params_specs=shards if zero.stage == 3 else EVERYWHERE,
            grads_specs=self._unsummed(self.trained(shards)),
        )
        grads, state = self.messages.exchange(
            found.grads,
            self._unsummed(zero.specs(self.specs)),
            found.sums["loss"].weight,
            state,
            before=partial(self.summed_inside, zero, scatter=False),
            out_specs=zero.specs(self.specs),
        )
        return found._replace(grads=zero.cut(grads)), state

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


def compressed_exchange(
    zero: ZeroSplit | None, inside: ZeroSplit | None, **settings: Any
) -> Exchange:
    """Build the compressed exchange for a ZeRO stage.

    Args:
      zero: the split of the training state, or None without ZeRO.
      inside: the field of `CompressedAllReduce` with this name, which is used only without ZeRO.
      settings: the values of all other fields of the exchange.
    """
    if zero is None:
        return CompressedAllReduce(zero=None, inside=inside, **settings)
    kind = CompressedScatter if zero.stage == 1 else CompressedUnsharded
    return kind(zero=zero, **settings)
