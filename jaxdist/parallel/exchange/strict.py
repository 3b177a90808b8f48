"""The exchange whose gradients have the same bits on any number of devices.

`parallel.deterministic` selects this exchange. A batch is divided by index into V logical shards,
where the config fixes V. The gradients, sums and buffers of a logical shard are computed by the
same program with the same shapes on any device, with a random key that depends on the shard's
index. The results are added up in the order of `jaxdist.parallel.strict.tree`: each device adds the
results of its shards, and `Reduction` adds the sums of all devices. The update is the same program
on any number of devices too. Without ZeRO the update runs on whole parameters. With ZeRO each split
parameter is divided into V parts, and each device updates its parts one after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxdist.collectives.operations import XLA
from jaxdist.models.loss import Batch, Sums, training_sums
from jaxdist.models.mean import check_adds_up, divisor
from jaxdist.optim.owners import Owner
from jaxdist.optim.safety import all_finite, global_norm
from jaxdist.parallel.compiler import PASSES, Options
from jaxdist.parallel.contract import BatchContext, Compute, Given, Gradients, StepInputs
from jaxdist.parallel.exchange.explicit import EVERYWHERE, Explicit
from jaxdist.parallel.strict.pieces import in_pieces, once
from jaxdist.parallel.strict.reduction import Reduction
from jaxdist.parallel.strict.tree import LocalTree, Order, add_blocks, settled, take_entry
from jaxdist.parallel.unshard import on_blocks
from jaxdist.parallel.wire import ZeroMessages
from jaxdist.trees import change_some, flatten_with_names, wide
from jaxdist.types import Buffers, Grads, Params, PyTree

AWAY = (
    "cse_barrier_expander",
    "while-loop-invariant-code-motion",
    "cse",
    "small-while-loop-hoisting",
)
"""The passes of XLA:CPU that are disabled. The first pass would remove barriers. The second pass
would move code out of loops; a device with a single shard has no loop and would compute that code
differently. The third pass would merge common subexpressions, and would do this earlier in a
partitioned program. Merging changes the number of uses of a divisor. From this number, XLA decides
whether to replace a division by a multiplication by the reciprocal. The last pass would unroll
small loops, but unrolled code has no barriers."""
ON_CPU: Options = {PASSES: ",".join(AWAY), "xla_cpu_multi_thread_eigen": False}
"""The compiler options on CPU. With threads in Eigen, the order of summation in a matmul would
depend on the number of threads."""


@dataclass(frozen=True)
class Strict(Explicit):
    """The exchange that adds up the gradients of logical shards in a fixed order.

    Attributes:
      order: the order in which shards are added up.
    """

    order: Order = field(kw_only=True)

    def options(self, platform: str) -> Options:
        return ON_CPU if platform == "cpu" else {}

    @property
    def devices(self) -> int:
        """The number of devices along the axes of the batch."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def local(self) -> LocalTree:
        """The sums that each device adds up alone, before devices exchange sums."""
        return self.order.on(self.devices)

    @property
    def reduction(self) -> Reduction:
        """The reduction over devices, which adds up the sums of all devices (see `local`)."""
        return Reduction(self.order, self.axes, self.devices, self.zero)

    def explain(self) -> str:
        """Describe in one line the work of each device."""
        local, shards = self.local, self.order.shards
        return (
            f"strict: {shards} logical shards, {local.shards} on each device, which holds at "
            f"most {local.held} gradients and sends {local.blocks}; any number of devices along "
            f"data that divides {shards} gives the same bits"
        )

    @property
    def _cut(self) -> str:
        """The clause that says how a batch is divided, for an error of `check_adds_up`."""
        return f"the batch is computed in {self.order.shards} logical shards"

    @property
    def _alone(self) -> bool:
        """Whether a single device, and not a group of devices, computes each logical shard."""
        return self.devices == self.mesh.size

    def gradients(self, compute: Compute, held: StepInputs, state: PyTree) -> tuple[Gradients, Any]:
        found = self._blocks(compute, held)
        shares = self.zero.specs(self.specs)
        total = self.mapped(self.reduction.total, (self.stacked_specs(),), shares)(found.grads)
        # The barrier separates this code from the code before it, which depends on the number of
        # devices: on one device a weight may be a constant. The gradients are multiplied by the
        # reciprocal, because XLA rewrites a division by the weight as such a multiplication, but
        # not for a shard of a single element.
        given = (total, 1 / divisor(found.sums["loss"].weight))
        total, factor = lax.optimization_barrier(given)
        mean = jax.tree.map(lambda g: (g * factor).astype(g.dtype), total)
        # The last barrier separates the mean from the update, which must be the same program for
        # any number of devices.
        return found._replace(grads=lax.optimization_barrier(self.zero.cut(mean))), state

    def sums(self, compute: Compute, params: Params, buffers: Buffers, batch: Batch) -> Sums:
        def run(params: Params, buffers: Buffers, batch: PyTree) -> Sums:
            rows = self._rows(batch)

            def one(number: jax.Array) -> Sums:
                given = (params, buffers, take_entry(rows, number))
                found = compute.sums(*settled(given, flat=self._alone))
                check_adds_up(found, self._cut)
                return training_sums(found)

            return self.reduction.everywhere(add_blocks(one, self.local, flat=self._alone))

        in_specs = EVERYWHERE, EVERYWHERE, PartitionSpec(self.axes)
        return self.mapped(run, in_specs, EVERYWHERE, self.axes)(params, buffers, batch)

    def shares(self, grads: Grads, params: Params) -> tuple[Any, Any]:
        grads, params = super().shares(grads, params)
        if self.zero.stage:
            # `apply` updates the parts of a tree separately. The optimizer skips the step of a part
            # that has a NaN. A NaN in one part must therefore be in all parts, so that the
            # optimizer skips the whole step.
            fine = all_finite(grads)
            grads = jax.tree.map(lambda g: jnp.where(fine, g, jnp.nan), grads)
        # With this barrier and the barriers below, XLA fuses the update with no code that depends
        # on the number of devices.
        return lax.optimization_barrier((grads, params))

    def publish(self, params: Params, into: Params) -> PyTree:
        # A gather only copies bits, so the gather of other exchanges gives the same bits here too.
        return super().publish(lax.optimization_barrier(params), into)

    def apply(
        self, function: Callable[..., tuple[Any, ...]], given: Given, rest: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Apply `function` to whole trees, or with ZeRO to each of the V parts of the trees.

        V is the number of logical shards, so the parts have the same shapes on any number of
        devices. The arguments are the arguments of `jaxdist.parallel.contract.Exchange.apply`.
        """
        zero = self.zero
        if not zero.stage:
            return self._once(function, [tree for tree, _ in given], rest)
        shares = {name: s.spec for name, s in flatten_with_names(self.placements.shares)}
        owners = [jax.tree.structure(tree).flatten_up_to(owned) for tree, owned in given]
        places = [[o and o.place_of(zero.dims[o.name]) for o in of] for of in owners]
        specs = [
            jax.tree.map(lambda _, o: o.spec(shares[o.name]) if o else EVERYWHERE, *of)
            for of in given
        ]

        def run(trees: list[PyTree], rest: tuple[Any, ...]) -> tuple[Any, ...]:
            return in_pieces(function, self.local.shards, trees, places, rest)

        filled = [_owned(zero.fill_one, *of) for of in given]
        count = len(jax.eval_shape(function, *(tree for tree, _ in given), *rest))
        found = self.mapped(run, (specs, EVERYWHERE), tuple(specs[-count:]))(filled, rest)
        last = [owned for _, owned in given[-count:]]
        cut = tuple(_owned(zero.cut_one, *of) for of in zip(found, last, strict=True))
        return lax.optimization_barrier(cut)

    def norm(self, grads: Grads) -> jax.Array:
        """Compute the global norm, in float32, with the same bits on any number of devices.

        With ZeRO, each split gradient is divided along its split dim into as many parts as there
        are logical shards, and the sums of squares of the parts are added up in the fixed order.
        """
        if not self.zero.stage:
            (found,) = self._once(lambda g, _: (global_norm(g),), [grads, jnp.float32(0)], ())
            return found
        square = self.mapped(self.reduction.square, (self.zero.specs(self.specs),), EVERYWHERE)
        return jnp.sqrt(square(self.zero.filled(grads)))

    def _once(
        self,
        function: Callable[..., tuple[Any, ...]],
        trees: Sequence[PyTree],
        rest: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """Apply `function` to values that are equal on all devices of the batch's axes.

        The arguments are the arguments of `jaxdist.parallel.strict.pieces.once`.

        The `jax.shard_map` makes the program the same for any number of devices. Without the
        `jax.shard_map`, functions that ask which mesh axes are auto axes would compute differently.
        """
        run = partial(once, function, flat=self._alone)
        return self.mapped(run, (EVERYWHERE, EVERYWHERE), EVERYWHERE, self.axes)(tuple(trees), rest)

    def _blocks(self, compute: Compute, held: StepInputs) -> Gradients:
        """Compute each device's sums of gradients, stacked along a first dim that `axes` split.

        The `sums` of the result are over all logical shards, and its `buffers` are means over all
        logical shards. The arguments are the arguments of `on_rows`.
        """

        def run(stored: Params, buffers: Buffers, batch: PyTree, key: jax.Array) -> Gradients:
            rows, first = self._rows(batch), lax.axis_index(self.axes) * self.local.shards
            entered = self._entered(stored)
            given = held._replace(params=entered, stored=(), buffers=buffers, key=None)

            def one(number: jax.Array) -> Gradients:
                # The key depends on the shard's index in the batch, not on the device, because
                # another number of devices must not change the masks.
                own = jax.random.fold_in(key, first + number)
                ready = given._replace(batch=take_entry(rows, number))
                ready = settled(ready, flat=self._alone)._replace(key=own)
                found = compute.gradients(ready, BatchContext())
                check_adds_up(found.sums, self._cut)
                return wide(found)

            found = add_blocks(one, self.local, flat=self._alone)
            sums, total = self.reduction.everywhere((found.sums, found.buffers))
            means = jax.tree.map(self.reduction.mean_like, total, buffers)
            return Gradients(found.grads, sums, means)

        out_specs: Any = Gradients(PartitionSpec(self.axes), cast(Any, EVERYWHERE), EVERYWHERE)
        return self.on_batch(run, held, out_specs)

    def _rows(self, batch: PyTree) -> PyTree:
        """Reshape a device's rows from `[B, ...]` to `[shards, B / shards, ...]`."""
        return jax.tree.map(lambda x: x.reshape(self.local.shards, -1, *x.shape[1:]), batch)

    def _entered(self, stored: Params) -> PyTree:
        """Return whole parameters; with ZeRO stage 3, gather them from their shards."""
        zero = self.zero
        if zero.stage < 3:
            return stored
        leaves, structure = jax.tree.flatten(stored)
        lengths, specs = zero.lengths_of(stored), jax.tree.leaves(self.all_specs)
        split = {i: dim for i, dim in enumerate(zero.dims_of(stored)) if dim is not None}
        given = {"dims": [*split.values()], "lengths": [lengths[i] for i in split]}
        gather = partial(ZeroMessages(zero.axes, XLA).gather, **given)
        gathered = on_blocks(gather, [specs[i] for i in split])
        return structure.unflatten(change_some(gathered, leaves, [*split]))


def _owned(change: Callable[[Any, Owner], Any], tree: PyTree, owners: PyTree) -> PyTree:
    return jax.tree.map(lambda x, owner: change(x, owner) if owner else x, tree, owners)
