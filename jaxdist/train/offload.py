"""The optimizer's state in the host's memory, which an update streams through the device.

XLA begins all copies from the host as early as it can, so that the whole state would be in the
device's memory at once. The update therefore runs group by group. The copies of a group depend, by
a barrier, on the previous group's state in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxdist.errors import ConfigError
from jaxdist.models.remat import HOST_MEMORY
from jaxdist.optim.owners import Owner, of_params
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.train.home import Home
from jaxdist.trees import leaf_bytes
from jaxdist.types import Leaf, OptState, Params, PyTree

GROUPS = 8
"""The number of groups of parameters that an update tries to form. A group contains at least one
parameter, so that a large parameter is a group by itself."""


@dataclass(frozen=True)
class HostMemory:
    """A view that keeps the shards of the optimizer's state in the host's memory.

    Attributes:
      zero: the split of the state; only the state of split parameters is moved.
      in_files: whether checkpoints read and write the host's memory directly. If they do not, the
        whole state is copied to the device first.
    """

    zero: ZeroSplit
    in_files: bool
    in_steps: bool = field(default=False, init=False)
    params: bool = field(default=False, init=False)

    def store(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self._moved(leaf, owner, jax.memory.Space.Host)

    def use(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self._moved(leaf, owner, jax.memory.Space.Device)

    def _moved(self, leaf: Leaf, owner: Owner, space: Any) -> PyTree:
        return jax.device_put(leaf, space) if on_host(self.zero, owner) else leaf


def on_host(zero: ZeroSplit | None, owner: Owner) -> bool:
    """Return whether the optimizer's state of a parameter is in the host's memory.

    The state of parameters that are not split is small, and stays on the device.
    """
    return zero is not None and zero.offload and zero.dims[owner.name] is not None


def check_host_memory(zero: ZeroSplit | None) -> None:
    """Refuse `parallel.zero.offload` on devices that cannot access the host's memory.

    Raises:
      ConfigError: the setting is on, and the host's memory is not among the devices' memories.
    """
    if zero is None or not zero.offload:
        return
    memories = [one.kind for one in zero.mesh.local_devices[0].addressable_memories()]
    if HOST_MEMORY not in memories:
        raise ConfigError(
            f"zero: offload true keeps the optimizer's state in the host's memory ({HOST_MEMORY}), "
            f"but these devices have only {', '.join(memories)}: set parallel.zero.offload: false",
            setting=("zero", "offload"),
        )


def streamed(
    update: Callable[[OptState], tuple[Any, ...]], stored: OptState, home: Home, params: Params
) -> tuple[Any, OptState, OptState]:
    """Update the parameters group by group, so that few groups are on the device at once.

    Each group calls `update` with the whole state, and uses only the results of its parameters. XLA
    removes the rest, so that the results need only the copies of their group. An optimizer whose
    results for a parameter depend on the state of other parameters is correct too, but copies that
    state again for each group.

    Args:
      update: the function from the optimizer's state, in the form of steps, to the new parameters
        and the new state.
      stored: the optimizer's state in its stored form.
      home: the conversions of the state.
      params: the parameters that are updated.

    Returns:
      The new parameters; the new state in the form of steps, of which only the leaves without an
      owner may be used; and the new state in its stored form.
    """
    leaves, structure = jax.tree.flatten(stored)
    owners = structure.flatten_up_to(home.owners)
    names = [owner.name for owner in jax.tree.leaves(of_params(params))]
    new_params, new_leaves = jax.tree.leaves(params), list(leaves)
    before: list[jax.Array] = []
    found: Any = ()
    for group in groups_of(names, leaves, owners):
        mine = [i for i, owner in enumerate(owners) if owner is not None and owner.name in group]
        held = list(leaves)
        if before and mine:
            waiting = jax.lax.optimization_barrier(([leaves[i] for i in mine], before))[0]
            for i, leaf in zip(mine, waiting, strict=True):
                held[i] = leaf
        found = update(home.opt_to_step(structure.unflatten(held)))
        kept = structure.flatten_up_to(home.opt_from_step(found[1]))
        for i, owner in enumerate(owners):
            if owner is None or owner.name in group:
                new_leaves[i] = kept[i]
        for i, leaf in enumerate(jax.tree.leaves(found[0])):
            if names[i] in group:
                new_params[i] = leaf
        before = [new_leaves[i] for i in mine]
    made = jax.tree.unflatten(jax.tree.structure(params), new_params)
    return made, found[1], structure.unflatten(new_leaves)


def groups_of(
    names: Sequence[str], leaves: Sequence[Leaf], owners: Sequence[Owner | None]
) -> list[frozenset[str]]:
    """Divide parameters, in their order, into groups whose states have similar sizes.

    Args:
      names: the names of the parameters.
      leaves: the leaves of the optimizer's state.
      owners: the parameter to which each leaf belongs, or None if it belongs to none.

    >>> leaf = jax.ShapeDtypeStruct((4,), "float32")
    >>> state = [Owner(name, (0,)) for name in "abc"]
    >>> [sorted(group) for group in groups_of("abcd", [leaf] * 3, state)]
    [['a'], ['b'], ['c', 'd']]
    """
    sizes = dict.fromkeys(names, 0)
    for leaf, owner in zip(leaves, owners, strict=True):
        if owner is not None:
            sizes[owner.name] += leaf_bytes(leaf)
    most = max(1, sum(sizes.values()) // GROUPS)
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and size and filled + size > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return [frozenset(group) for group in groups]
