"""State and parameters in the host's memory, which an update streams through the device.

XLA begins all copies from the host as early as it can, so that the complete state would be in the
device's memory at once. The update therefore runs group by group. The copies of a group depend, by
a barrier, on the previous group's state in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxdist.errors import ConfigError
from jaxdist.models.remat import HOST_MEMORY
from jaxdist.optim.owners import Owner, of_params
from jaxdist.parallel.contract import Exchange
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.train.home import Home
from jaxdist.trees import leaf_bytes
from jaxdist.types import Leaf, OptState, Params, PyTree, Shardings

GROUPS = 8
"""The number of groups of parameters that an update tries to form. A group contains at least one
parameter, so that a large parameter is a group by itself."""


def check_host_memory(zero: ZeroSplit) -> None:
    """Refuse `parallel.zero.offload` and `offload_parameters` where devices have no host memory.

    Raises:
      ConfigError: a setting is on, and the host's memory is not among the devices' memories.
    """
    if not (zero.offloaded or zero.resting):
        return
    memories = [one.kind for one in zero.mesh.local_devices[0].addressable_memories()]
    if HOST_MEMORY not in memories:
        held, name = "offload true keeps the optimizer's state", "offload"
        instead = "set parallel.zero.offload: false"
        if not zero.offloaded:
            held, name = "offload_parameters keeps parameters", "offload_parameters"
            instead = "leave out parallel.zero.offload_parameters"
        raise ConfigError(
            f"zero: {held} in the host's memory ({HOST_MEMORY}), "
            f"but these devices have only {', '.join(memories)}: {instead}",
            setting=("zero", name),
        )


def streamed(
    update: Callable[[Params, OptState], tuple[Any, ...]],
    stored: OptState,
    params: Params,
    home: Home,
    exchange: Exchange,
    after: jax.Array,
) -> tuple[Any, OptState, OptState]:
    """Update the parameters group by group, so that few groups are on the device at once.

    Each group calls `update` with the complete state, and uses only the results of its parameters.
    XLA removes all other results, so that the results of a group need only the copies of their
    group. An optimizer whose results for a parameter depend on the state of other parameters is
    correct too, but copies that state again for each group.

    Args:
      update: the function from the parameters and the optimizer's state to the new parameters and
        the new state, all in the form with which steps compute.
      stored: the optimizer's state in its stored form.
      params: the parameters that are updated.
      home: the conversions of the optimizer's state.
      exchange: the exchange, whose placements are the shardings of the parameters.
      after: the norm of the gradients. No parameter is copied to the device before the norm is
        known, since the backward pass needs the memory.

    Returns:
      The new parameters; the optimizer's new state in the form with which steps compute, of which
      only the leaves without an owner may be used; and the optimizer's new state in its stored
      form.
    """
    resting, placements = exchange.zero.resting, exchange.placements
    whole, shares = home.model.divided(placements.params)[0], placements.shares
    leaves, structure = jax.tree.flatten(stored)
    owners = structure.flatten_up_to(home.owners)
    given, like = jax.tree.flatten(params)
    names = [owner.name for owner in jax.tree.leaves(of_params(params))]
    new_params, new_leaves = list(given), list(leaves)
    before: list[jax.Array] = [after] if resting else []
    found: Any = ()
    for group in groups_of(_sizes(names, given, leaves, owners, resting)):
        mine = [i for i, owner in enumerate(owners) if owner is not None and owner.name in group]
        copied = [i for i, name in enumerate(names) if name in group & resting]
        held, own = list(leaves), list(given)
        if before and (mine or copied):
            moving = [leaves[i] for i in mine], [given[i] for i in copied]
            waiting = jax.lax.optimization_barrier((moving, before))[0]
            for into, places, arrays in zip((held, own), (mine, copied), waiting, strict=True):
                for i, leaf in zip(places, arrays, strict=True):
                    into[i] = leaf
        ready = _copied(like.unflatten(own), shares, resting, jax.memory.Space.Device)
        found = update(ready, home.to_step.opt_state(structure.unflatten(held)))
        kept = structure.flatten_up_to(home.from_step.opt_state(found[1]))
        for i, owner in enumerate(owners):
            if owner is None or owner.name in group:
                new_leaves[i] = kept[i]
        back = _copied(found[0], whole, resting, jax.memory.Space.Host)
        for i, leaf in enumerate(jax.tree.leaves(back)):
            if names[i] in group:
                new_params[i] = leaf
        before = [new_leaves[i] for i in mine] + [new_params[i] for i in copied] or before
    return like.unflatten(new_params), found[1], structure.unflatten(new_leaves)


def _copied(params: Params, shardings: Shardings, names: frozenset[str], space: Any) -> PyTree:
    """Copy the named parameters to a memory, and change their shardings."""

    def copied(leaf: jax.Array, sharding: Any, owner: Owner) -> jax.Array:
        if owner.name not in names:
            return leaf
        # A sharding is set while the leaf is in the device's memory, from which XLA can send.
        if space == jax.memory.Space.Device:
            leaf = jax.device_put(leaf, space)
        leaf = jax.lax.with_sharding_constraint(leaf, sharding)
        return jax.device_put(leaf, space)

    return jax.tree.map(copied, params, shardings, of_params(params))


def _sizes(
    names: Sequence[str],
    params: Sequence[Leaf],
    leaves: Sequence[Leaf],
    owners: Sequence[Owner | None],
    resting: frozenset[str],
) -> dict[str, int]:
    """Return the bytes that a step streams through the device, by the name of the parameter."""
    pairs = zip(names, params, strict=True)
    sizes = {name: leaf_bytes(leaf) * (name in resting) for name, leaf in pairs}
    for leaf, owner in zip(leaves, owners, strict=True):
        if owner is not None:
            sizes[owner.name] += leaf_bytes(leaf)
    return sizes


def groups_of(sizes: Mapping[str, int]) -> list[frozenset[str]]:
    """Divide parameters, in their order, into groups whose states have similar sizes.

    Args:
      sizes: the bytes of each parameter's state, by name.

    >>> [sorted(group) for group in groups_of({"a": 16, "b": 16, "c": 16, "d": 0})]
    [['a'], ['b'], ['c', 'd']]
    """
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
