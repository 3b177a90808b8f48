"""The base class of all exchanges, which has the shardings of parameters and an empty state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxdist.models.loss import Batch, Sums
from jaxdist.parallel.compiler import Options
from jaxdist.parallel.contract import Compute, Given, Placements
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.trees import divide
from jaxdist.types import Buffers, Grads, Params, PyTree, Shardings


@dataclass(frozen=True)
class Base:
    """The base class of exchanges; its state is empty.

    Attributes:
      whole: the shardings that the parameters have without ZeRO, a tree like the parameters.
      zero: the split of the training state over replicas; without ZeRO its stage is 0.
      frozen: the names of the parameters that are not trained and have no gradients.
    """

    whole: Shardings
    zero: ZeroSplit
    frozen: frozenset[str] = field(default=frozenset(), kw_only=True)

    @property
    def keeps_barriers(self) -> bool:
        return False

    def options(self, platform: str) -> Options:
        return {}

    def sums(self, compute: Compute, params: Params, buffers: Buffers, batch: Batch) -> Sums:
        return compute.sums(params, buffers, batch)

    @property
    def mesh(self) -> Mesh:
        """The mesh that the step runs on."""
        return self.zero.mesh

    @property
    def placements(self) -> Placements:
        shares = self.zero.shardings(self.whole)
        return Placements(shares if self.zero.stage == 3 else self.whole, self.trained(shares))

    def trained(self, tree: PyTree) -> PyTree:
        """Return a tree like the parameters without the leaves of frozen parameters."""
        return divide(tree, self.frozen)[0]

    @cached_property
    def all_specs(self) -> PyTree:
        """The partition specs of all parameters before ZeRO splits them."""
        return jax.tree.map(lambda sharding: sharding.spec, self.whole)

    @cached_property
    def specs(self) -> PyTree:
        """The partition specs of the trained parameters and of their gradients, before ZeRO."""
        return self.trained(self.all_specs)

    def init(self, params: Params) -> PyTree:
        return ()

    def state_shardings(self, state: PyTree) -> PyTree:
        """Return shardings that replicate the state on all devices."""
        return jax.tree.map(lambda _: NamedSharding(self.mesh, PartitionSpec()), state)

    def reshard(self, saved: PyTree, state: PyTree) -> PyTree:
        """Return the saved state unchanged, because the state is the same on every mesh."""
        return saved

    def shares(self, grads: Grads, params: Params) -> tuple[Any, Any]:
        if not self.zero.stage:
            return grads, params
        lie = self.placements.shares
        return jax.lax.with_sharding_constraint((grads, params), (lie, lie))

    def apply(
        self, function: Callable[..., tuple[Any, ...]], given: Given, rest: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        return function(*(tree for tree, _ in given), *rest)
