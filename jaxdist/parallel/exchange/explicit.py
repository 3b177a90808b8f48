"""The base classes of exchanges that call collectives explicitly.

A step uses two `jax.shard_map`s. The `jax.shard_map` around the model is manual on the data axes
only, so that the model is unchanged and XLA still inserts the communication of tensor axes. The
`jax.shard_map` around a reduction is manual on all axes. The reduction therefore sees plain local
blocks, no matter how other axes shard the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdist.collectives.algorithms.halving import Halving
from jaxdist.collectives.bucket import BUCKET_BYTES, reduce_tree, sends_apart
from jaxdist.collectives.contract import Algorithm
from jaxdist.collectives.layer_chunks import Layers, by_layers
from jaxdist.collectives.operations import XLA
from jaxdist.compression import Codec
from jaxdist.models.mean import check_adds_up
from jaxdist.optim.safety import global_norm, global_norm_of_shards
from jaxdist.parallel.contract import BatchContext, Compute, Gradients, StepInputs
from jaxdist.parallel.exchange.base import Base
from jaxdist.parallel.unshard import on_blocks
from jaxdist.parallel.wire import ZeroMessages
from jaxdist.trees import change_some, flatten_with_names, leaf_bytes
from jaxdist.types import Buffers, Grads, Params, PyTree, Specs

EVERYWHERE = PartitionSpec()
LEAST_CHUNKS = 16
"""The minimum number of chunks into which stacked layers are divided for their messages. Chunks
must be small, because two of them are in memory at a time."""


@dataclass(frozen=True)
class Explicit(Base):
    """An exchange in which each device computes gradients of its rows and calls collectives itself.

    Attributes:
      axes: the mesh axes that split the batch. The axis across the slowest network comes first.
      algorithm: the algorithm of the sums over `axes`.
      reduce_dtype: the dtype in which gradients are sent and summed, or None for the dtype of the
        gradients.
      scanned: the names of the parameters whose first dim counts layers.
      global_statistics: whether a BatchNorm of the model averages over the rows of all devices,
        instead of the rows of one device.
    """

    axes: tuple[str, ...] = field(kw_only=True)
    algorithm: Algorithm = field(kw_only=True)
    reduce_dtype: str | None = field(default=None, kw_only=True)
    scanned: frozenset[str] = field(default=frozenset(), kw_only=True)
    global_statistics: bool = field(default=True, kw_only=True)
    explicit: bool = field(default=True, init=False)

    def norm(self, grads: Grads) -> jax.Array:
        if not self.zero.stage:
            return global_norm(grads)
        return global_norm_of_shards(grads, self.placements.shares)

    def mapped(
        self,
        function: Callable[..., Any],
        in_specs: PyTree,
        out_specs: PyTree,
        axes: tuple[str, ...] = (),
    ) -> Callable[..., Any]:
        """Return a function that calls `function` on each device, in a `jax.shard_map`.

        Args:
          function: the function that each device runs; it may call collectives.
          in_specs: the partition specs of the arguments.
          out_specs: the partition specs of the results.
          axes: the manual axes, or () for all axes of the mesh.
        """
        # With `check_vma`, jax would refuse results of `ppermute` and of gathers, because it cannot
        # prove that they are equal on all devices.
        return jax.shard_map(
            function,
            mesh=self.mesh,
            axis_names={*axes},
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,
        )

    def on_rows(
        self,
        compute: Compute,
        held: StepInputs,
        *,
        enter: Callable[[PyTree], PyTree] = lambda params: params,
        leave: Callable[[PyTree], PyTree],
        grads_specs: Specs,
    ) -> Gradients:
        """Compute gradients of the total loss on each device's rows.

        The `sums` of the result are summed over all devices, and its `buffers` are means over all
        devices. Random layers use a different key on each device, so their masks differ from the
        masks on a single device.

        Args:
          compute: the computation of gradients.
          held: the inputs of the step, with the whole batch.
          enter: the function from a device's stored parameters to the parameters that `compute`
            gets.
          leave: the function from a device's gradients to the `grads` of the result.
          grads_specs: the partition specs of the results of `leave` over `axes`.
        """
        around = BatchContext(self.axes, self.axes if self.global_statistics else ())

        def run(params: Params, buffers: Buffers, batch: PyTree, key: jax.Array) -> Gradients:
            # With a common key, dropout would drop the same units on all devices.
            key = jax.random.fold_in(key, jax.lax.axis_index(self.axes))
            own = held._replace(params=enter(params), buffers=buffers, batch=batch, key=key)
            found = compute.gradients(own, around)
            check_adds_up(
                found.sums, f"each device along {', '.join(self.axes)} has its own examples"
            )
            # Between processes on CPUs, gloo's all-reduce of a number takes thirty times longer
            # than sending the number.
            quick = Halving() if sends_apart() else XLA
            sums = reduce_tree(found.sums, self.axes, algorithm=quick)
            return Gradients(leave(found.grads), sums, self._mean(found.buffers))

        return self.on_batch(run, held, Gradients(grads_specs, cast(Any, EVERYWHERE), EVERYWHERE))

    def on_batch(
        self, function: Callable[..., Gradients], held: StepInputs, out_specs: PyTree
    ) -> Gradients:
        """Call `function` on each device with stored parameters, buffers, its rows and the key."""
        params = self.shard_specs(held.stored) if self.zero.stage == 3 else EVERYWHERE
        in_specs = params, EVERYWHERE, PartitionSpec(self.axes), EVERYWHERE
        run = self.mapped(function, in_specs, out_specs, self.axes)
        return run(held.stored, held.buffers, held.batch, held.key)

    def shard_specs(self, params: Params) -> PyTree:
        """Return the partition specs, over the axes of ZeRO only, of the shards of parameters."""
        return self.zero.specs(jax.tree.map(lambda _: EVERYWHERE, params))

    def _mean(self, buffers: Buffers) -> PyTree:
        leaves, structure = jax.tree.flatten(buffers)
        # Integer buffers, such as counts of steps, are equal on all devices, and a mean would be a
        # float.
        floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
        mean = partial(reduce_tree, axis=self.axes, op="mean", algorithm=XLA)
        return structure.unflatten(change_some(mean, leaves, floating))

    def stacked(self, compute: Compute, held: StepInputs) -> Gradients:
        """Compute each device's gradients without summing them over devices.

        The gradients of all devices are stacked along a new first dim, which `axes` split. The
        arguments are the arguments of `on_rows`.
        """
        per_device = PartitionSpec(self.axes)
        return self.on_rows(compute, held, leave=with_leading_dim, grads_specs=per_device)

    def stacked_specs(self) -> PyTree:
        """Return the partition specs, over all axes, of the gradients that `stacked` returns."""
        return jax.tree.map(lambda spec: PartitionSpec(self.axes, *spec), self.specs)

    def on_all_axes(self, reduce: Callable[[Any, jax.Array], Any], out_specs: Specs) -> PyTree:
        """Return a function that calls `reduce` on each device, in a `shard_map` over all axes.

        The function takes the gradients that `stacked` returns, and a weight. `reduce` gets the
        gradients of its device without the stacked dim, and the weight.

        Args:
          reduce: the function that each device runs; it may call collectives.
          out_specs: the partition specs of the results of `reduce`.
        """

        def run(stacked: Grads, weight: jax.Array) -> PyTree:
            # The leading dim is split over `axes`, so each device has exactly one entry.
            return reduce(jax.tree.map(lambda g: g[0], stacked), weight)

        return self.mapped(run, (self.stacked_specs(), EVERYWHERE), out_specs)

    def layers_of(self, tree: PyTree, dims: Sequence[int | None]) -> list[int | None]:
        """Return the number of layers that each leaf stacks.

        Args:
          tree: a tree like the trained parameters.
          dims: the dim of each leaf that ZeRO splits, or None if ZeRO does not split the leaf.

        Returns:
          One entry for each leaf: the length of its first dim, or None if this dim does not count
          layers or ZeRO splits it.
        """
        return [
            leaf.shape[0] if name in self.scanned and dim != 0 else None
            for (name, leaf), dim in zip(flatten_with_names(tree), dims, strict=True)
        ]

    def chunk_bytes(self, leaves: Layers) -> int:
        """Return the bytes of stacked layers that are sent in one message.

        The result is the algorithm's `bucket_bytes` if that setting is a number. Otherwise the
        result is `BUCKET_BYTES`, or less if the leaves would then be divided into fewer than
        `LEAST_CHUNKS` chunks. Between processes on CPUs the second limit does not apply.
        """
        chosen = self.algorithm.bucket_bytes
        if isinstance(chosen, int):
            return chosen
        if sends_apart():  # Each message has its own latency, so few messages are better.
            return BUCKET_BYTES
        return min(BUCKET_BYTES, sum(map(leaf_bytes, leaves)) // LEAST_CHUNKS)

    def sum(self, grads: Layers, axes: tuple[str, ...]) -> Layers:
        """Sum gradients over axes in `reduce_dtype`, and convert sums to the gradients' dtypes."""
        carried = [g.astype(self.reduce_dtype or g.dtype) for g in grads]
        total = reduce_tree(carried, axes, algorithm=self.algorithm)
        return [g.astype(like.dtype) for g, like in zip(total, grads, strict=True)]

    def publish(self, params: Params, into: Params) -> PyTree:
        if self.zero.stage in (0, 3):
            return params
        gather = self.mapped(self._gather, (self.zero.specs(self.specs), self.specs), self.specs)
        return gather(self.zero.filled(params), into)

    def _gather(self, shards: Params, into: Params) -> PyTree:
        zero = self.zero
        # This `ZeroMessages` has neither codecs nor dtypes for messages, because new parameters
        # must be exact.
        wire, dims = ZeroMessages(zero.axes, self.algorithm), zero.dims_of(into)
        lengths, (whole, structure) = zero.lengths_of(into), jax.tree.flatten(into)

        def gather(positions: list[int], leaves: Layers) -> Layers:
            cut = [lengths[i] for i in positions if dims[i] is not None]
            return together(partial(wire.gather, lengths=cut), leaves, [dims[i] for i in positions])

        layers, parts = self.layers_of(into, dims), jax.tree.leaves(shards)
        chunk = self.chunk_bytes(whole)
        return structure.unflatten(by_layers(gather, parts, layers, chunk, into=whole))


@dataclass(frozen=True)
class Sharding(Explicit):
    """The base class of explicit exchanges with ZeRO, which sum gradients into shards.

    Attributes:
      reduce_codec: the codec of gradients, without error feedback, or None to send them
        uncompressed.
    """

    reduce_codec: Codec | None = field(default=None, kw_only=True)

    @property
    def keeps_barriers(self) -> bool:
        """Whether replicas need barriers, which is true below ZeRO stage 3.

        A device uses the result of its update twice: it keeps the result and sends it. Without a
        barrier XLA would fuse the update into both uses, and might round the kept and the sent
        value differently.
        """
        return self.zero.stage < 3

    def wire(self) -> ZeroMessages:
        config = self.zero.config
        dtypes = config.gather_dtype, self.reduce_dtype
        codecs = config.gather_codec, self.reduce_codec
        return ZeroMessages(self.zero.axes, self.algorithm, *dtypes, config.prefetch, *codecs)

    def finish(self, grads: Grads) -> PyTree:
        """Sum gradients over the axes of the batch over which they are not summed yet.

        A tensor that ZeRO does not split is summed over all axes of the batch. A shard, which is
        already summed over ZeRO's axes, is summed over the other axes of the batch.
        """
        zero = self.zero
        leaves, structure = jax.tree.flatten(grads)
        dims, blocks = zero.dims_of(grads), jax.tree.leaves(self.specs)
        others = tuple(axis for axis in self.axes if axis not in zero.axes)
        for axes, split in ((self.axes, False), (others, True)):
            mine = [i for i, dim in enumerate(dims) if axes and (dim is not None) is split]
            total = on_blocks(partial(self.sum, axes=axes), [blocks[i] for i in mine])
            leaves = change_some(total, leaves, mine)
        return structure.unflatten(leaves)


def with_leading_dim(grads: Grads) -> PyTree:
    """Add a first dim of length 1 to each gradient."""
    return jax.tree.map(lambda g: g[None], grads)


def over(weight: jax.Array, grads: Grads) -> PyTree:
    """Divide gradients by the weight of the whole batch, and keep the gradients' dtypes.

    A weight of 0 gives NaN. `Program.update` skips the step of such a batch.
    """
    # `divisor` must not be used here. XLA may find that a weight is constant, but the select in
    # `divisor` hides the constant until XLA partitions the program. With `divisor`, replicas were
    # rounded differently (with reduce halving, ZeRO 2, and a tensor axis that splits nothing).
    return jax.tree.map(lambda g: (g / weight).astype(g.dtype), grads)


def together(send: Callable[..., Layers], leaves: Layers, dims: Sequence[int | None]) -> Layers:
    """Call `send` once with all leaves that have a split dim, and return the changed leaves.

    Args:
      send: the function, with the arguments (list of leaves, list of their split dims).
      leaves: all leaves.
      dims: the split dim of each leaf, or None for a leaf that `send` must not get.

    Returns:
      All leaves in their order and dtypes; a leaf without a split dim is unchanged.
    """
    split = {i: dim for i, dim in enumerate(dims) if dim is not None}

    def sent(some: Layers) -> Layers:
        pairs = zip(send(some, [*split.values()]), some, strict=True)
        return [new.astype(old.dtype) for new, old in pairs]

    return change_some(sent, leaves, [*split])
