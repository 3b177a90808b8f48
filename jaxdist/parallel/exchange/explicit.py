"""The common part of exchanges whose collectives jaxdist calls: each device has its own rows.

There are two `jax.shard_map`s. The `jax.shard_map` around the model is manual on the data axes
only, so that the model is unchanged and XLA still places the communication of tensor axes. The
`jax.shard_map` around a reduction is manual on all axes, so that the reduction sees plain local
blocks, however other axes shard the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxdist.collectives.algorithms.halving import Halving
from jaxdist.collectives.bucket import BUCKET_BYTES, reduce_tree, sends_apart
from jaxdist.collectives.contract import Algorithm
from jaxdist.collectives.operations import XLA
from jaxdist.compression import Codec
from jaxdist.models.loss import Batch
from jaxdist.models.mean import check_adds_up
from jaxdist.optim.safety import global_norm, global_norm_of_shards
from jaxdist.parallel.contract import BatchContext, Compute, Gradients, StepInputs
from jaxdist.parallel.exchange.base import Base
from jaxdist.parallel.layer_chunks import Layers, by_layers
from jaxdist.parallel.unshard import on_blocks
from jaxdist.parallel.wire import ZeroMessages
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.trees import flatten_with_names, leaf_bytes
from jaxdist.types import Buffers, Grads, Params, PyTree, Specs

EVERYWHERE = PartitionSpec()
LEAST_CHUNKS = 16
"""The least number of chunks of stacked layers; chunks must be small, since two are in memory."""


@dataclass(frozen=True)
class Explicit(Base):
    """An exchange that sums the gradients of each device's own rows by explicit collectives.

    Attributes:
      axes: mesh axes that split the batch, slowest first.
      algorithm: the algorithm of the sums over these axes.
      reduce_dtype: dtype in which gradients are sent and summed; None keeps their own dtype.
      scanned: names of the parameters whose first dim counts layers.
      global_statistics: whether a BatchNorm of the model averages over the rows of all devices.
    """

    mesh: Mesh = field(kw_only=True)
    axes: tuple[str, ...] = field(kw_only=True)
    algorithm: Algorithm = field(kw_only=True)
    reduce_dtype: str | None = field(default=None, kw_only=True)
    scanned: frozenset[str] = field(default=frozenset(), kw_only=True)
    global_statistics: bool = field(default=True, kw_only=True)
    explicit: bool = field(default=True, init=False)

    def norm(self, grads: Grads) -> jax.Array:
        if self.zero is None:
            return global_norm(grads)
        return global_norm_of_shards(grads, self.placements.shares)

    def on_rows(
        self,
        compute: Compute,
        held: StepInputs,
        batch: Batch,
        key: jax.Array,
        *,
        enter: Callable[[PyTree], PyTree] = lambda params: params,
        leave: Callable[[PyTree], PyTree],
        params_specs: Specs = EVERYWHERE,
        grads_specs: Specs,
    ) -> Gradients:
        """Compute gradients of the total loss on each device's rows.

        The sums of the result are over all devices, its buffers are means. Random layers draw
        separately on each device, so their masks differ from the masks on a single device.

        Args:
          enter: function from a device's stored parameters to the parameters of its computation.
          leave: function from a device's gradients to the `grads` of the result.
          params_specs: partition specs of the stored parameters.
          grads_specs: partition specs of the results of `leave`.
        """
        around = BatchContext(self.axes, self.axes if self.global_statistics else ())

        def run(params: Params, buffers: Buffers, batch: PyTree, key: jax.Array) -> Gradients:
            # With a common key, dropout would drop the same units on all devices.
            key = jax.random.fold_in(key, jax.lax.axis_index(self.axes))
            own = held._replace(params=enter(params), buffers=buffers)
            found = compute.gradients(own, batch, key, around)
            check_adds_up(
                found.sums, (f"each part of mesh axis {', '.join(self.axes)} has rows of its own")
            )
            # Between processes on CPUs, gloo's own all-reduce of a number takes thirty times longer
            # than sending the number.
            quick = Halving() if sends_apart() else XLA
            sums = reduce_tree(found.sums, self.axes, algorithm=quick)
            return Gradients(leave(found.grads), sums, self._mean(found.buffers))

        return jax.shard_map(
            run,
            mesh=self.mesh,
            axis_names=set(self.axes),
            in_specs=(params_specs, EVERYWHERE, PartitionSpec(self.axes), EVERYWHERE),
            out_specs=Gradients(grads_specs, cast(Any, EVERYWHERE), EVERYWHERE),
            check_vma=False,
        )(held.stored, held.buffers, batch, key)

    def _mean(self, buffers: Buffers) -> PyTree:
        leaves, structure = jax.tree.flatten(buffers)
        # Integer buffers, such as counts of steps, are equal on all devices, and a mean would be a
        # float.
        floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
        means = reduce_tree([leaves[i] for i in floating], self.axes, op="mean", algorithm=XLA)
        for i, mean in zip(floating, means, strict=True):
            leaves[i] = mean
        return structure.unflatten(leaves)

    def stacked(
        self, compute: Compute, held: StepInputs, batch: Batch, key: jax.Array
    ) -> Gradients:
        """Compute each device's own gradients, stacked along a leading dim that `axes` split."""
        per_device = PartitionSpec(self.axes)
        return self.on_rows(
            compute, held, batch, key, leave=_with_leading_dim, grads_specs=per_device
        )

    def on_all_axes(self, reduce: Callable[[Any, jax.Array], Any], out_specs: Specs) -> PyTree:
        """Return a function that calls `reduce` on each device, manual on all axes.

        The function takes the gradients from `stacked`, and a weight.
        """

        def run(stacked: Grads, weight: jax.Array) -> PyTree:
            # The leading dim is split over `axes`, so each device has exactly one entry.
            return reduce(jax.tree.map(lambda g: g[0], stacked), weight)

        # With `check_vma`, jax would refuse results of `ppermute`, because it cannot prove that the
        # algorithm makes them equal on all devices.
        stacked = jax.tree.map(lambda spec: PartitionSpec(self.axes, *spec), self.specs)
        return jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(stacked, EVERYWHERE),
            out_specs=out_specs,
            check_vma=False,
        )

    def layers_of(self, tree: PyTree, dims: Sequence[int | None]) -> list[int | None]:
        """Return each leaf's number of layers, or None if it has none or the layers are split."""
        return [
            leaf.shape[0] if name in self.scanned and dim != 0 else None
            for (name, leaf), dim in zip(flatten_with_names(tree), dims, strict=True)
        ]

    def chunk_bytes(self, leaves: Layers) -> int:
        """Return the bytes of stacked layers per message, a small part of all unless configured."""
        chosen = self.algorithm.bucket_bytes
        if isinstance(chosen, int):
            return chosen
        if sends_apart():  # Each message has its own latency, so few messages are better.
            return BUCKET_BYTES
        return min(BUCKET_BYTES, sum(map(leaf_bytes, leaves)) // LEAST_CHUNKS)

    def sum(self, grads: Layers, axes: tuple[str, ...]) -> Layers:
        """Sum gradients over axes in `reduce_dtype`, and return the sums in their own dtypes."""
        carried = [g.astype(self.reduce_dtype or g.dtype) for g in grads]
        total = reduce_tree(carried, axes, algorithm=self.algorithm)
        return [g.astype(like.dtype) for g, like in zip(total, grads, strict=True)]


@dataclass(frozen=True)
class Sharding(Explicit):
    """The common part of explicit exchanges with ZeRO, which gathers the new parameters.

    Attributes:
      reduce_codec: codec of gradients, without feedback; None sends them uncompressed.
    """

    zero: ZeroSplit
    reduce_codec: Codec | None = field(default=None, kw_only=True)

    @property
    def keeps_barriers(self) -> bool:
        """Whether replicas need barriers: XLA would fuse the update into its two uses.

        The value that a device keeps and the value that it sends would then be rounded differently.
        """
        return self.zero.stage < 3

    def wire(self) -> ZeroMessages:
        zero = self.zero
        dtypes = zero.gather_dtype, self.reduce_dtype
        codecs = zero.gather_codec, self.reduce_codec
        return ZeroMessages(zero.axes, self.algorithm, *dtypes, zero.prefetch, *codecs)

    def finish(self, grads: Grads) -> PyTree:
        """Sum over the remaining axes: whole tensors over all data axes, shards over other axes."""
        zero = self.zero
        leaves, structure = jax.tree.flatten(grads)
        dims, blocks = zero.dims_of(grads), jax.tree.leaves(self.specs)
        others = tuple(axis for axis in self.axes if axis not in zero.axes)
        for axes, split in ((self.axes, False), (others, True)):
            mine = [i for i, dim in enumerate(dims) if (dim is not None) is split]
            if axes and mine:
                total = on_blocks(partial(self.sum, axes=axes), [blocks[i] for i in mine])
                for i, leaf in zip(mine, total([leaves[i] for i in mine]), strict=True):
                    leaves[i] = leaf
        return structure.unflatten(leaves)

    def publish(self, params: Params, into: Params) -> PyTree:
        if self.zero.stage == 3:
            return params
        return jax.shard_map(
            self._gather,
            mesh=self.mesh,
            in_specs=(self.zero.specs(self.specs), self.specs),
            out_specs=self.specs,
            check_vma=False,
        )(self.zero.filled(params), into)

    def _gather(self, shards: Params, into: Params) -> PyTree:
        zero = self.zero
        # The codec and the dtypes of `wire` are not used: new parameters must be exact.
        wire, dims = ZeroMessages(zero.axes, self.algorithm), zero.dims_of(into)
        lengths, (whole, structure) = zero.lengths_of(into), jax.tree.flatten(into)

        def gather(positions: list[int], leaves: Layers) -> Layers:
            cut = [lengths[i] for i in positions if dims[i] is not None]
            return together(partial(wire.gather, lengths=cut), leaves, [dims[i] for i in positions])

        layers, parts = self.layers_of(into, dims), jax.tree.leaves(shards)
        chunk = self.chunk_bytes(whole)
        return structure.unflatten(by_layers(gather, parts, layers, chunk, into=whole))


def _with_leading_dim(grads: Grads) -> PyTree:
    return jax.tree.map(lambda g: g[None], grads)


def over(weight: jax.Array, grads: Grads) -> PyTree:
    """Divide gradients by the weight of the whole batch, and keep the gradients' dtypes.

    A weight of 0 gives NaN, which is never used: a program whose batches may have no weight skips
    such a step (`Program.update`).
    """
    # `divisor` must not be used here. XLA may know a weight to be constant, but the select in
    # `divisor` hides that until the program is partitioned: replicas then rounded differently
    # (reduce halving, ZeRO 2, and an idle tensor axis).
    return jax.tree.map(lambda g: (g / weight).astype(g.dtype), grads)


def together(send: Callable[..., Layers], leaves: Layers, dims: Sequence[int | None]) -> Layers:
    """Call `send` on all leaves that have a split dim at once, and return all leaves."""
    found, split = list(leaves), [(i, dim) for i, dim in enumerate(dims) if dim is not None]
    sent = send([leaves[i] for i, _ in split], [dim for _, dim in split])
    for (i, _), leaf in zip(split, sent, strict=True):
        found[i] = leaf.astype(leaves[i].dtype)
    return found
