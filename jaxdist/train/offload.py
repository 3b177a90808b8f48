"""State and parameters in the host's memory, which an update streams through the device.

XLA begins all copies from the host as early as it can, so that the complete state would be in the
device's memory at once. The update therefore runs group by group. The copies of a group depend, by
a barrier, on the previous group's state in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxdist.errors import ConfigError
from jaxdist.models.remat import HOST_MEMORY
from jaxdist.optim.owners import Owner, of_params
from jaxdist.parallel.zero import ZeroSplit
from jaxdist.train.home import Home
from jaxdist.trees import leaf_bytes
from jaxdist.types import Leaf, OptState, Params, PyTree, Shardings

GROUPS = 8
"""The number of groups of parameters that an update tries to form. A group contains at least one
parameter, so that a large parameter is a group by itself."""


@dataclass(frozen=True)
class HostMemory:
    """A view that keeps the shards of the optimizer's state in the host's memory.

    Attributes:
      zero: the split of the state; only the state of split parameters is moved.
      in_files: whether checkpoints read and write the host's memory directly. If they do not, the
        complete state is copied to the device first.
    """

    zero: ZeroSplit
    in_files: bool
    in_steps: bool = field(default=False, init=False)
    params: bool = field(default=False, init=False)
    opt_state: bool = field(default=True, init=False)

    def store(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self._moved(leaf, owner, jax.memory.Space.Host)

    def use(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self._moved(leaf, owner, jax.memory.Space.Device)

    def _moved(self, leaf: Leaf, owner: Owner, space: Any) -> PyTree:
        return jax.device_put(leaf, space) if on_host(self.zero, owner) else leaf


@dataclass(frozen=True)
class HostParameters:
    """A view that keeps chosen parameters in the host's memory.

    A step copies these parameters to the device where the step uses them
    (`jaxdist.models.host.resting`).

    Attributes:
      names: the names of these parameters.
    """

    names: frozenset[str]
    in_steps: bool = field(default=True, init=False)
    in_files: bool = field(default=True, init=False)
    params: bool = field(default=True, init=False)
    opt_state: bool = field(default=False, init=False)

    def store(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self._moved(leaf, owner, jax.memory.Space.Host)

    def use(self, leaf: Leaf, owner: Owner) -> PyTree:
        return self._moved(leaf, owner, jax.memory.Space.Device)

    def _moved(self, leaf: Leaf, owner: Owner, space: Any) -> PyTree:
        return jax.device_put(leaf, space) if owner.name in self.names else leaf


def on_host(zero: ZeroSplit | None, owner: Owner) -> bool:
    """Return whether the optimizer's state of a parameter is in the host's memory.

    The state of parameters that are not split is small, and stays on the device.

    Args:
      zero: the split of the state by ZeRO, or None without ZeRO.
      owner: the parameter.
    """
    return zero is not None and zero.offload and zero.dims[owner.name] is not None


def check_host_memory(zero: ZeroSplit | None) -> None:
    """Refuse `parallel.zero.offload` and `offload_parameters` where devices have no host memory.

    Raises:
      ConfigError: a setting is on, and the host's memory is not among the devices' memories.
    """
    if zero is None or not (zero.offload or zero.resting):
        return
    memories = [one.kind for one in zero.mesh.local_devices[0].addressable_memories()]
    if HOST_MEMORY not in memories:
        held, name = "offload true keeps the optimizer's state", "offload"
        instead = "set parallel.zero.offload: false"
        if not zero.offload:
            held, name = "offload_parameters keeps parameters", "offload_parameters"
            instead = "leave out parallel.zero.offload_parameters"
        raise ConfigError(
            f"zero: {held} in the host's memory ({HOST_MEMORY}), "
            f"but these devices have only {', '.join(memories)}: {instead}",
            setting=("zero", name),
        )


@dataclass(frozen=True)
class StreamedLeaves:
    """The leaves in the host's memory that an update streams through the device.

    Attributes:
      home: the conversions of the optimizer's state.
      resting: the names of the parameters in the host's memory.
      whole: the shardings of the parameters between steps.
      shares: the shardings of the parameters during the update.
    """

    home: Home
    resting: frozenset[str]
    whole: Shardings
    shares: Shardings

    def to_device(self, params: Params) -> PyTree:
        """Copy parameters in the host's memory to the device, with the shardings of the update."""
        return self._each(params, self.shares, jax.memory.Space.Device)

    def to_host(self, params: Params) -> PyTree:
        """Copy the new parameters back to the memory and the shardings that `to_device` changed."""
        return self._each(params, self.whole, jax.memory.Space.Host)

    def _each(self, params: Params, shardings: Shardings, space: Any) -> PyTree:
        def moved(leaf: jax.Array, sharding: Any, owner: Owner) -> jax.Array:
            if owner.name not in self.resting:
                return leaf
            # A sharding is set while the leaf is in the device's memory, from which XLA can send.
            if space == jax.memory.Space.Device:
                leaf = jax.device_put(leaf, space)
            leaf = jax.lax.with_sharding_constraint(leaf, sharding)
            return jax.device_put(leaf, space)

        return jax.tree.map(moved, params, shardings, of_params(params))


def streamed(
    update: Callable[[Params, OptState], tuple[Any, ...]],
    stored: OptState,
    params: Params,
    streams: StreamedLeaves,
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
      streams: the leaves in the host's memory.
      after: the norm of the gradients. No parameter is copied to the device before the norm is
        known, since the backward pass needs the memory.

    Returns:
      The new parameters; the optimizer's new state in the form with which steps compute, of which
      only the leaves without an owner may be used; and the optimizer's new state in its stored
      form.
    """
    home = streams.home
    leaves, structure = jax.tree.flatten(stored)
    owners = structure.flatten_up_to(home.owners)
    given, like = jax.tree.flatten(params)
    names = [owner.name for owner in jax.tree.leaves(of_params(params))]
    new_params, new_leaves = list(given), list(leaves)
    before: list[jax.Array] = [after] if streams.resting else []
    found: Any = ()
    for group in groups_of(_sizes(names, given, leaves, owners, streams.resting)):
        mine = [i for i, owner in enumerate(owners) if owner is not None and owner.name in group]
        resting = [i for i, name in enumerate(names) if name in group & streams.resting]
        held, own = list(leaves), list(given)
        if before and (mine or resting):
            moving = [leaves[i] for i in mine], [given[i] for i in resting]
            waiting = jax.lax.optimization_barrier((moving, before))[0]
            for into, places, arrays in zip((held, own), (mine, resting), waiting, strict=True):
                for i, leaf in zip(places, arrays, strict=True):
                    into[i] = leaf
        found = update(
            streams.to_device(like.unflatten(own)), home.opt_to_step(structure.unflatten(held))
        )
        kept = structure.flatten_up_to(home.opt_from_step(found[1]))
        for i, owner in enumerate(owners):
            if owner is None or owner.name in group:
                new_leaves[i] = kept[i]
        for i, leaf in enumerate(jax.tree.leaves(streams.to_host(found[0]))):
            if names[i] in group:
                new_params[i] = leaf
        before = [new_leaves[i] for i in mine] + [new_params[i] for i in resting] or before
    return like.unflatten(new_params), found[1], structure.unflatten(new_leaves)


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
