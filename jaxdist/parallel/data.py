"""Data parallelism on a manual axis: each device's own gradients, then a reduction of ours.

Two `jax.shard_map`s. The first is manual on the data axes only, so that the model inside stays as
it is and XLA goes on to place what tensor axes need; each device leaves its gradients unreduced,
stacked along a new leading dim that lies over the data axes. The second is manual on all axes, so
that the reduction sees plain local blocks, whatever else shards them.

With ZeRO the second leaves each device its shard of the sum (stage 1); or there is none, because
gradients are summed into shards where the backward pass makes them (stages 2 and 3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxdist.collectives.bucket import reduce_tree
from jaxdist.collectives.contract import Algorithm
from jaxdist.parallel.deferred import Wire, defer
from jaxdist.parallel.gather import gather_into
from jaxdist.parallel.zero import Zero
from jaxdist.trees import flatten_with_names

Local = Callable[[Any, Any, Any, jax.Array], tuple[Any, Any, Any]]
"""(params, buffers, rows, key) to (gradients, sums, buffers) of these rows alone."""


@dataclass(frozen=True)
class DataParallel:
    """The sum of all devices' gradients, by an algorithm of ours.

    Attributes:
      axes: mesh axes that split the batch, slowest first.
      algorithm: how gradients are summed over them.
      zero: which of them each device keeps only a shard of, and of which parameters it has one.
      reduce_dtype: in which they travel and are summed; None is their own.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    algorithm: Algorithm
    zero: Zero | None = None
    reduce_dtype: str | None = None

    def gradients(
        self, local: Local, specs: Any, params: Any, buffers: Any, batch: Any, key: jax.Array
    ) -> tuple[Any, Any, Any]:
        """`local` on each device's rows of the batch, summed; buffers become their mean.

        Random layers draw anew on each device, so their masks differ from those of one device.

        Args:
          specs: partition specs of whole parameters, none of which names a data axis.
        """
        if self.zero is not None and self.zero.stage >= 2:
            return self._gradients_in_shards(self.zero, local, specs, params, buffers, batch, key)
        everywhere = PartitionSpec()
        per_device = PartitionSpec(self.axes)
        stacked, sums, buffers = jax.shard_map(
            lambda *args: self._on_rows(local, *args),
            mesh=self.mesh,
            axis_names=set(self.axes),
            in_specs=(everywhere, everywhere, per_device, everywhere),
            out_specs=(per_device, everywhere, everywhere),
            check_vma=False,
        )(params, buffers, batch, key)
        total = jax.shard_map(
            self._reduce,
            mesh=self.mesh,
            in_specs=(jax.tree.map(lambda spec: PartitionSpec(self.axes, *spec), specs),),
            out_specs=specs if self.zero is None else self.zero.specs(specs),
            check_vma=False,
        )(stacked)
        return total, sums, buffers

    def _on_rows(
        self, local: Local, params: Any, buffers: Any, batch: Any, key: jax.Array
    ) -> tuple[Any, Any, Any]:
        key = jax.random.fold_in(key, jax.lax.axis_index(self.axes))
        grads, sums, buffers = local(params, buffers, batch, key)
        stacked = jax.tree.map(lambda g: g[None], grads)
        return stacked, jax.lax.psum(sums, self.axes), jax.tree.map(self._mean, buffers)

    def _mean(self, buffer: jax.Array) -> jax.Array:
        floating = jnp.issubdtype(buffer.dtype, jnp.inexact)
        return jax.lax.pmean(buffer, self.axes) if floating else buffer

    def _reduce(self, stacked: Any) -> Any:
        grads = jax.tree.map(lambda g: g[0], stacked)
        if self.zero is None:
            return self._sum(grads, self.axes)
        wire = self._wire(self.zero)

        def scatter(grad: jax.Array, dim: int | None) -> jax.Array:
            return grad if dim is None else wire.scatter(grad, dim).astype(grad.dtype)

        return self._finish(self.zero, self.zero.map(scatter, grads))

    def _sum(self, grads: Any, axes: tuple[str, ...]) -> Any:
        carried = jax.tree.map(lambda g: g.astype(self.reduce_dtype or g.dtype), grads)
        total = reduce_tree(carried, axes, algorithm=self.algorithm)
        return jax.tree.map(lambda g, like: g.astype(like.dtype), total, grads)

    def _wire(self, zero: Zero) -> Wire:
        return Wire(zero.axes, self.algorithm, zero.gather_dtype, self.reduce_dtype)

    def _finish(self, zero: Zero, grads: Any) -> Any:
        """Sum what is still unsummed: whole tensors over all data axes, shards over the others."""
        leaves, structure = jax.tree.flatten(grads)
        dims = zero.dims_of(grads)
        others = tuple(axis for axis in self.axes if axis not in zero.axes)
        for axes, split in ((self.axes, False), (others, True)):
            mine = [i for i, dim in enumerate(dims) if (dim is not None) is split]
            if axes:
                found = self._sum([leaves[i] for i in mine], axes)
                for i, leaf in zip(mine, found, strict=True):
                    leaves[i] = leaf
        return jax.tree.unflatten(structure, leaves)

    def gather(self, specs: Any, shards: Any, into: Any, scanned: Collection[str]) -> Any:
        """Whole parameters out of their shards, layer by layer where layers are stacked.

        Args:
          specs: partition specs of whole parameters.
          shards: the new parameters, split as `zero` says.
          into: the old ones, whole; their buffers take the new values where they are donated.
          scanned: names of the parameters whose first dim counts layers.
        """
        assert self.zero is not None
        return jax.shard_map(
            partial(self._gather, self.zero, scanned),
            mesh=self.mesh,
            in_specs=(self.zero.specs(specs), specs),
            out_specs=specs,
            check_vma=False,
        )(shards, into)

    def _gather(self, zero: Zero, scanned: Collection[str], shards: Any, into: Any) -> Any:
        wire = Wire(zero.axes, self.algorithm)
        whole, structure = jax.tree.flatten(into)
        stacked = [name in scanned for name, _ in flatten_with_names(into)]
        parts = jax.tree.leaves(shards)
        found = gather_into(parts, whole, zero.dims_of(into), stacked, wire.gather)
        return jax.tree.unflatten(structure, found)

    def _gradients_in_shards(
        self,
        zero: Zero,
        local: Local,
        specs: Any,
        params: Any,
        buffers: Any,
        batch: Any,
        key: jax.Array,
    ) -> tuple[Any, Any, Any]:
        """The same where a layer's gradients leave as soon as they are made."""
        everywhere, per_device = PartitionSpec(), PartitionSpec(self.axes)
        split = zero.specs(jax.tree.map(lambda _: everywhere, params))
        return jax.shard_map(
            lambda *args: self._on_rows_in_shards(zero, local, specs, *args),
            mesh=self.mesh,
            axis_names=set(self.axes),
            in_specs=(split if zero.stage == 3 else everywhere, everywhere, per_device, everywhere),
            out_specs=(split, everywhere, everywhere),
            check_vma=False,
        )(params, buffers, batch, key)

    def _on_rows_in_shards(
        self,
        zero: Zero,
        local: Local,
        specs: Any,
        params: Any,
        buffers: Any,
        batch: Any,
        key: jax.Array,
    ) -> tuple[Any, Any, Any]:
        key = jax.random.fold_in(key, jax.lax.axis_index(self.axes))
        wire, sharded = self._wire(zero), zero.stage == 3
        leaves, structure = jax.tree.flatten(params)
        deferred = [
            leaf if dim is None else defer(leaf, dim, wire, spec, sharded=sharded)
            for leaf, dim, spec in zip(
                leaves, zero.dims_of(params), jax.tree.leaves(specs), strict=True
            )
        ]
        grads, sums, buffers = local(structure.unflatten(deferred), buffers, batch, key)
        sums = jax.lax.psum(sums, self.axes)
        return self._finish(zero, grads), sums, jax.tree.map(self._mean, buffers)
