"""Data parallelism on a manual axis: each device's own gradients, then a reduction of ours.

Two `jax.shard_map`s. The first is manual on the data axes only, so that the model inside stays as
it is and XLA goes on to place what tensor axes need; each device leaves its gradients unreduced,
stacked along a new leading dim that lies over the data axes. The second is manual on all axes, so
that the reduction sees plain local blocks, whatever else shards them.

With ZeRO the second leaves each device its shard of the sum (stage 1); or there is none, because
gradients are summed into shards where the backward pass makes them (stages 2 and 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxdist.collectives.algorithms.halving import Halving
from jaxdist.collectives.bucket import BUCKET_BYTES, reduce_tree, sends_apart
from jaxdist.collectives.contract import Algorithm
from jaxdist.collectives.operations import XLA
from jaxdist.parallel.layer_chunks import Layers, by_layers
from jaxdist.parallel.unshard import Wire, defer, on_blocks
from jaxdist.parallel.zero import Zero
from jaxdist.trees import flatten_with_names, leaf_bytes

Local = Callable[[Any, Any, Any, jax.Array], tuple[Any, Any, Any]]
"""(params, buffers, rows, key) to (gradients, sums, buffers) of these rows alone."""

EVERYWHERE = PartitionSpec()
LEAST_TURNS = 16
"""A turn holds its layers twice, which shall be little beside a small model too."""


@dataclass(frozen=True)
class DataParallel:
    """The sum of all devices' gradients, by an algorithm of ours.

    Attributes:
      axes: mesh axes that split the batch, slowest first.
      algorithm: how gradients are summed over them.
      zero: which of them each device keeps only a shard of, and of which parameters it has one.
      reduce_dtype: in which they travel and are summed; None is their own.
      scanned: names of the parameters whose first dim counts layers.
      global_statistics: whether a BatchNorm of the model sees the rows of all devices.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    algorithm: Algorithm
    zero: Zero | None = None
    reduce_dtype: str | None = None
    scanned: frozenset[str] = frozenset()
    global_statistics: bool = True

    def gradients(
        self,
        local: Local,
        weight: Callable[[Any], jax.Array],
        specs: Any,
        params: Any,
        buffers: Any,
        batch: Any,
        key: jax.Array,
    ) -> tuple[Any, Any, Any]:
        """`local` on each device's rows of the batch, summed, over a weight; buffers' mean.

        Random layers draw anew on each device, so their masks differ from those of one device.

        Args:
          weight: what the sum of gradients is divided by, of the sums over all devices.
          specs: partition specs of whole parameters, none of which names a data axis.
          params: as they are stored: in stage 3 those that `zero` fills up are.

        Returns:
          Gradients of the parameters' own shapes, split as `zero` says; sums; buffers.
        """
        zero, given = self.zero, (params, buffers, batch, key)
        if zero is not None and zero.stage >= 2:
            split = zero.specs(jax.tree.map(lambda _: EVERYWHERE, params))
            held = split if zero.stage == 3 else EVERYWHERE
            enter, leave = partial(self._defer, zero, specs), partial(self._finish, zero, specs)
            grads, sums, buffers = self._on_rows(local, enter, leave, held, split)(*given)
            return _over(weight(sums), zero.cut(grads)), sums, buffers
        per_device = PartitionSpec(self.axes)
        on_rows = self._on_rows(local, lambda params: params, _stacked, EVERYWHERE, per_device)
        stacked, sums, buffers = on_rows(*given)
        mean = jax.shard_map(
            partial(self._reduce, specs),
            mesh=self.mesh,
            in_specs=(
                jax.tree.map(lambda spec: PartitionSpec(self.axes, *spec), specs),
                EVERYWHERE,
            ),
            out_specs=specs if zero is None else zero.specs(specs),
            check_vma=False,
        )(stacked, weight(sums))
        return mean if zero is None else zero.cut(mean), sums, buffers

    def _on_rows(
        self,
        local: Local,
        enter: Callable[[Any], Any],
        leave: Callable[[Any], Any],
        params_specs: Any,
        grads_specs: Any,
    ) -> Local:
        """`local` on each device's rows: of what parameters enter as, to how gradients leave."""

        def run(params: Any, buffers: Any, batch: Any, key: jax.Array) -> tuple[Any, Any, Any]:
            key = jax.random.fold_in(key, jax.lax.axis_index(self.axes))
            grads, sums, buffers = local(enter(params), buffers, batch, key)
            # Between processes of CPUs a number travels thirty times as fast as gloo sums it.
            quick = Halving() if sends_apart() else XLA
            sums = reduce_tree(sums, self.axes, algorithm=quick)
            return leave(grads), sums, self._mean(buffers)

        return jax.shard_map(
            run,
            mesh=self.mesh,
            axis_names=set(self.axes),
            in_specs=(params_specs, EVERYWHERE, PartitionSpec(self.axes), EVERYWHERE),
            out_specs=(grads_specs, EVERYWHERE, EVERYWHERE),
            check_vma=False,
        )

    def _mean(self, buffers: Any) -> Any:
        leaves, structure = jax.tree.flatten(buffers)
        floating = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
        means = reduce_tree([leaves[i] for i in floating], self.axes, op="mean", algorithm=XLA)
        for i, mean in zip(floating, means, strict=True):
            leaves[i] = mean
        return structure.unflatten(leaves)

    def _reduce(self, specs: Any, stacked: Any, weight: jax.Array) -> Any:
        grads = jax.tree.map(lambda g: g[0], stacked)
        if self.zero is not None:
            return _over(weight, self._finish(self.zero, specs, self._scatter(self.zero, grads)))
        leaves, structure = jax.tree.flatten(grads)
        layers = self._layers(grads, [None] * len(leaves))

        def mean(positions: list[int], leaves: Layers) -> Layers:
            # Here, while a turn is at hand: after the last it would be one more pass, and buffer.
            return _over(weight, self._sum(leaves, self.axes))

        found = by_layers(mean, leaves, layers, self._turn(leaves))
        return structure.unflatten(found)

    def _layers(self, tree: Any, dims: Sequence[int | None]) -> list[int | None]:
        """How many layers each leaf has; None is no stack, or one whose layers are split."""
        return [
            leaf.shape[0] if name in self.scanned and dim != 0 else None
            for (name, leaf), dim in zip(flatten_with_names(tree), dims, strict=True)
        ]

    def _turn(self, leaves: Layers) -> int:
        """How many bytes of stacked layers are sent at once: if not chosen, few beside them all."""
        chosen = self.algorithm.bucket_bytes
        if isinstance(chosen, int):
            return chosen
        if sends_apart():  # few messages weigh more there than little memory
            return BUCKET_BYTES
        return min(BUCKET_BYTES, sum(map(leaf_bytes, leaves)) // LEAST_TURNS)

    def _sum(self, grads: Layers, axes: tuple[str, ...]) -> Layers:
        carried = [g.astype(self.reduce_dtype or g.dtype) for g in grads]
        total = reduce_tree(carried, axes, algorithm=self.algorithm)
        return [g.astype(like.dtype) for g, like in zip(total, grads, strict=True)]

    def _wire(self, zero: Zero) -> Wire:
        return Wire(zero.axes, self.algorithm, zero.gather_dtype, self.reduce_dtype, zero.prefetch)

    def _scatter(self, zero: Zero, grads: Any) -> Any:
        """This device's shards of the sums over ZeRO's axes; what is not split stays unsummed."""
        leaves, structure = jax.tree.flatten(grads)
        wire, dims = self._wire(zero), zero.dims_of(grads)

        def scatter(positions: list[int], leaves: Layers) -> Layers:
            return _sent(wire.scatter, leaves, [dims[i] for i in positions])

        layers = self._layers(grads, dims)
        return structure.unflatten(by_layers(scatter, leaves, layers, self._turn(leaves)))

    def _finish(self, zero: Zero, specs: Any, grads: Any) -> Any:
        """Sum what is still unsummed: whole tensors over all data axes, shards over the others."""
        leaves, structure = jax.tree.flatten(grads)
        dims, blocks = zero.dims_of(grads), jax.tree.leaves(specs)
        others = tuple(axis for axis in self.axes if axis not in zero.axes)
        for axes, split in ((self.axes, False), (others, True)):
            mine = [i for i, dim in enumerate(dims) if (dim is not None) is split]
            if axes and mine:
                total = on_blocks(partial(self._sum, axes=axes), [blocks[i] for i in mine])
                for i, leaf in zip(mine, total([leaves[i] for i in mine]), strict=True):
                    leaves[i] = leaf
        return structure.unflatten(leaves)

    def gather(self, specs: Any, shards: Any, into: Any) -> Any:
        """Whole parameters out of their shards.

        Args:
          specs: partition specs of whole parameters.
          shards: the new parameters, split as `zero` says.
          into: the old ones, whole; their buffers take the new values where they are donated.
        """
        assert self.zero is not None
        return jax.shard_map(
            partial(self._gather, self.zero),
            mesh=self.mesh,
            in_specs=(self.zero.specs(specs), specs),
            out_specs=specs,
            check_vma=False,
        )(self.zero.filled(shards), into)

    def _gather(self, zero: Zero, shards: Any, into: Any) -> Any:
        wire, dims = Wire(zero.axes, self.algorithm), zero.dims_of(into)
        lengths, (whole, structure) = zero.lengths_of(into), jax.tree.flatten(into)

        def gather(positions: list[int], leaves: Layers) -> Layers:
            cut = [lengths[i] for i in positions if dims[i] is not None]
            return _sent(partial(wire.gather, lengths=cut), leaves, [dims[i] for i in positions])

        layers, parts = self._layers(into, dims), jax.tree.leaves(shards)
        return structure.unflatten(by_layers(gather, parts, layers, self._turn(whole), into=whole))

    def _defer(self, zero: Zero, specs: Any, params: Any) -> Any:
        """Parameters that are fetched, or whose gradients leave, where they are used."""
        wire, sharded = self._wire(zero), zero.stage == 3
        leaves, structure = jax.tree.flatten(params)
        given = zero.dims_of(params), zero.lengths_of(params), jax.tree.leaves(specs)
        deferred = [
            leaf if dim is None else defer(leaf, dim, wire, spec, sharded=sharded, length=length)
            for leaf, dim, length, spec in zip(leaves, *given, strict=True)
        ]
        return structure.unflatten(deferred)


def _stacked(grads: Any) -> Any:
    """Each device's own, for a leading dim over the data axes."""
    return jax.tree.map(lambda g: g[None], grads)


def _over(weight: jax.Array, grads: Any) -> Any:
    return jax.tree.map(lambda g: (g / weight).astype(g.dtype), grads)


def _sent(wire: Callable[..., Layers], leaves: Layers, dims: Sequence[int | None]) -> Layers:
    """The leaves, those that are split sent together along their dims."""
    found, split = list(leaves), [(i, dim) for i, dim in enumerate(dims) if dim is not None]
    sent = wire([leaves[i] for i, _ in split], [dim for _, dim in split])
    for (i, _), leaf in zip(split, sent, strict=True):
        found[i] = leaf.astype(leaves[i].dtype)
    return found
