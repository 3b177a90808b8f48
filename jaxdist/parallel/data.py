"""Data parallelism on a manual axis: each device's own gradients, then a reduction of ours.

Two `jax.shard_map`s. The first is manual on the data axes only, so that the model inside stays as
it is and XLA goes on to place what tensor axes need; each device leaves its gradients unreduced,
stacked along a new leading dim that lies over the data axes. The second is manual on all axes, so
that the reduction sees plain local blocks, whatever else shards them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxdist.collectives.bucket import reduce_tree
from jaxdist.collectives.contract import Algorithm

Local = Callable[[Any, Any, Any, jax.Array], tuple[Any, Any, Any]]
"""(params, buffers, rows, key) to (gradients, sums, buffers) of these rows alone."""


@dataclass(frozen=True)
class DataParallel:
    """The sum of all devices' gradients, by an algorithm of ours.

    Attributes:
      axes: mesh axes that split the batch, slowest first.
      algorithm: how gradients are summed over them.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    algorithm: Algorithm

    def gradients(
        self, local: Local, specs: Any, params: Any, buffers: Any, batch: Any, key: jax.Array
    ) -> tuple[Any, Any, Any]:
        """`local` on each device's rows of the batch, summed; buffers become their mean.

        Random layers draw anew on each device, so their masks differ from those of one device.

        Args:
          specs: partition specs of the parameters, none of which names a data axis.
        """
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
            out_specs=specs,
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
        return reduce_tree(grads, self.axes, algorithm=self.algorithm)
