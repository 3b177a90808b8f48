"""The compressed all-reduce inside a compressed exchange, with the state of its codec."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist.collectives.contract import Algorithm
from jaxdist.compression import CompressionState, compressed_all_reduce, init_state
from jaxdist.compression.choice import PerParameter
from jaxdist.compression.feedback.contract import Feedback
from jaxdist.compression.reshard import reshard
from jaxdist.models.mean import divisor
from jaxdist.types import Grads, PyTree, Specs

EVERYWHERE = PartitionSpec()


@dataclass(frozen=True)
class Messages:
    """A compressed all-reduce that sums a tree of blocks over devices.

    Each leaf of the state has a leading dim over all devices of the mesh, because each device keeps
    the residual of the messages that it sends.

    Attributes:
      mesh: the mesh that the step runs on.
      axes: the mesh axes over which messages are sent. The axis across the slowest network comes
        first.
      blocks: the shapes of a device's blocks in float32, a tree like the trained parameters.
      choice: the codec of each parameter.
      feedback: the error feedback.
      algorithm: the algorithm that sends the messages.
      seed: the seed of random choices.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    blocks: PyTree
    choice: PerParameter
    feedback: Feedback
    algorithm: Algorithm
    seed: int = 0

    @property
    def spec(self) -> PartitionSpec:
        """The partition spec of every leaf of the state."""
        return PartitionSpec(self.mesh.axis_names)

    def init(self) -> CompressionState:
        """Return the state of all devices before the first step."""
        own = init_state(self.blocks, self.parties, codec=self.choice, feedback=self.feedback)
        # All devices begin with equal states, so one state is repeated for the whole mesh.
        shape = (self.mesh.size,)
        return jax.tree.map(lambda x: jnp.broadcast_to(x[:1], shape + x.shape[1:]), own)

    @cached_property
    def parties(self) -> int:
        """The number of devices that exchange messages with each other."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def shardings(self, state: PyTree) -> PyTree:
        return jax.tree.map(lambda _: NamedSharding(self.mesh, self.spec), state)

    def reshard(self, saved: PyTree, state: PyTree) -> PyTree:
        """Convert a saved state to the shapes of `state` by `jaxdist.compression.reshard`.

        The saved state may be from a plan whose messages were sent over other axes.
        """
        places = [self.mesh.axis_names.index(axis) for axis in self.axes]
        return reshard(saved, state, [*self.mesh.shape.values()], places)

    def exchange(
        self,
        grads: Grads,
        specs: Specs,
        weight: jax.Array,
        state: CompressionState,
        *,
        before: Callable[[Any], Any] = lambda own: own,
        after: Callable[[Any], Any] = lambda total: total,
        out_specs: Specs,
    ) -> tuple[Any, CompressionState]:
        """Return the mean gradients, and the state of compression for the next step.

        Args:
          grads: the gradients of each device, with a leading dim over the axes over which the
            gradients are not summed yet.
          specs: the partition specs of `grads`.
          weight: the weight of the whole batch. Gradients are divided by the weight before they are
            compressed, so residuals are residuals of the mean.
          state: the state after the previous step.
          before: the function from a device's gradients to the blocks that it sends. Both `before`
            and `after` run inside a `jax.shard_map` that is manual on all axes.
          after: the function from the summed blocks to the mean gradients.
          out_specs: the partition specs of the results of `after`.
        """
        settings: dict[str, Any] = {"codec": self.choice, "feedback": self.feedback}
        settings |= {"algorithm": self.algorithm, "seed": self.seed}

        def run(grads: Grads, weight: jax.Array, state: CompressionState) -> PyTree:
            # Dividing before the codec keeps residuals valid if the next batch has another weight.
            own = jax.tree.map(lambda g: g[0].astype(jnp.float32) / divisor(weight), grads)
            found = compressed_all_reduce(before(own), state, self.axes, **settings)
            total = jax.tree.map(lambda x, g: x.astype(g.dtype), found.grads, grads)
            return after(total), found.state

        return jax.shard_map(
            run,
            mesh=self.mesh,
            in_specs=(specs, EVERYWHERE, self.spec),
            out_specs=(out_specs, self.spec),
            check_vma=False,
        )(grads, weight, state)


def blocks_of(shapes: PyTree, specs: Specs, mesh: Mesh) -> PyTree:
    """Return the shape, in float32, of one device's block of each array.

    Args:
      shapes: the shapes of the arrays.
      specs: the partition spec of each array.
      mesh: the mesh that the arrays are sharded on.
    """

    def block(like: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        shape: Sequence[int] = NamedSharding(mesh, spec).shard_shape(tuple(like.shape))
        return jax.ShapeDtypeStruct(tuple(shape), jnp.float32)

    return jax.tree.map(block, shapes, specs)
