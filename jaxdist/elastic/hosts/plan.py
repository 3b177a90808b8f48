"""The plan of a generation: the work of each host, computed from plain data.

The axes of the model in the mesh (tensor, stage, context, expert) keep their sizes, and the data
axis takes the remaining devices. Hosts take part in the order in which they joined. As many hosts
take part as can form a mesh. All other hosts wait, and are ready to replace a host that is lost.

The batch does not change, so every step takes the same examples in the same order and learns at the
same rate as without failures. If fewer devices share the batch, the batch is computed in more
microbatches. The number of microbatches is the smallest that divides the batch and for which no
device has more rows at the same time than on the full mesh. The full mesh is the mesh of the
config; if the config has data: -1, the full mesh is the mesh of the first generation. In formulas,
let D be the number of devices along data, m the number of microbatches, B the batch size, and D0
and m0 the values of D and m on the full mesh. Then m is the smallest number for which D m >= D0 m0
and B is a multiple of D m. With `elastic.batch: rescale` in the config, the batch is B D / D0
instead, and each device has as many rows as on the full mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxdist.checkpoint.layout import snapshot_of
from jaxdist.errors import RunError
from jaxdist.types import Json, JsonObject

DATA = "data"
AXES = ("data", "stage", "tensor", "context", "expert")


@dataclass(frozen=True)
class HostFacts:
    """The facts about a host that the plan needs.

    Attributes:
      host: a name that no other agent has.
      name: the name of the host for messages.
      address: the address at which the other hosts reach this host.
      processes: the number of processes that the host can run.
      devices: the number of devices of each process.
      parts: the names of the snapshot parts that the host has.
      copies: the HOST:PORT of the server that sends these parts to other hosts.
    """

    host: str
    name: str
    address: str
    processes: int
    devices: int
    parts: tuple[str, ...] = ()
    copies: str = ""

    @classmethod
    def of(cls, host: str, facts: Mapping[str, Any]) -> HostFacts:
        """Read the facts from a host's message."""
        keys = ("name", "address", "processes", "devices", "copies")
        return cls(host, **{key: facts[key] for key in keys}, parts=tuple(facts["parts"]))


@dataclass(frozen=True)
class BatchRule:
    """The mesh and the batch of the config, and their change with the number of devices.

    Attributes:
      mesh: the size of each axis, in the order of the config. If an axis spans two networks, its
        size is a mapping from each network (`dcn`, `ici`) to a size.
      batch_size: the number of examples in a step.
      microbatches: the number of microbatches on the full mesh.
      full: the number of devices along data on the full mesh if the config has data: -1, or None
        before the first generation.
      rescales: whether the batch size shrinks and grows with the mesh.
    """

    mesh: Mapping[str, Json]
    batch_size: int
    microbatches: int = 1
    full: int | None = None
    rescales: bool = False

    @classmethod
    def of(cls, values: JsonObject, full: int | None) -> BatchRule:
        """Read the rule from the values of a config.

        Args:
          full: the number of devices along data on the full mesh, or None if it is not known yet.
        """
        mesh, train = values.get("mesh") or {}, values.get("train") or {}
        sizes = {axis: size for axis, size in mesh.items() if axis in AXES and size is not None}
        given = train.get("batch_size"), train.get("microbatches", 1)
        numbers = [number if isinstance(number, int) and number > 0 else 1 for number in given]
        rescales = (values.get("elastic") or {}).get("batch") == "rescale"
        return cls(sizes or {DATA: -1}, numbers[0], numbers[1], full, rescales)

    @property
    def others(self) -> int:
        """The product of the sizes of all axes except data."""
        return math.prod(_count(size) for axis, size in self.mesh.items() if axis != DATA)

    def data_size(self, devices: int) -> int:
        """Return the size of the data axis on a mesh of `devices` devices.

        Raises:
          RunError: the devices do not form a mesh.
        """
        fixed = {axis: size for axis, size in self.mesh.items() if axis != DATA}
        if -1 in fixed.values():
            raise RunError(
                f"an axis other than data has size -1 in the mesh {_shown(self.mesh)}: if the "
                "number of hosts changes, only mesh.data may be -1"
            )
        data = self.mesh.get(DATA, 1)
        if isinstance(data, Mapping) and devices != _count(data) * self.others:
            raise RunError(
                f"the mesh {_shown(self.mesh)} needs {_count(data) * self.others} devices, but "
                f"there are {devices}, and its axis data cannot shrink because it spans two "
                "networks: set mesh.data to a single number"
            )
        if devices % self.others or (DATA not in self.mesh and devices != self.others):
            whole = "a multiple of " if DATA in self.mesh else ""
            raise RunError(
                f"the mesh {_shown(self.mesh)} needs {whole}{self.others} devices, since its axes "
                f"other than data cannot shrink, but there are {devices} devices. Add hosts, or "
                "use smaller sizes of these axes"
            )
        return devices // self.others

    def settings(self, devices: int) -> tuple[str, ...]:
        """Return the settings that replace the config's mesh and batch on `devices` devices.

        Raises:
          RunError: the devices do not form a mesh, or no number of microbatches divides the batch.
        """
        data, written = self.data_size(devices), self.mesh.get(DATA, 1)
        found = []
        if isinstance(written, int) and written not in (-1, data):
            found.append(f"mesh.data={data}")
        if self.rescales:
            return (*found, *self._rescaled(data))
        count = self._microbatches(data)
        if count != self.microbatches:
            found.append(f"train.microbatches={count}")
        return tuple(found)

    def _full(self, data: int) -> int:
        written = self.mesh.get(DATA, 1)
        return (self.full or data) if written == -1 else _count(written)

    def _rescaled(self, data: int) -> tuple[str, ...]:
        """Return the settings that replace the config's batch settings if the batch is rescaled.

        Each device then has as many rows as on the full mesh. The result is () if the batch size
        does not change.

        Args:
          data: the size of axis data.

        Raises:
          RunError: the batch of the config does not divide over the devices of the full mesh.
        """
        size, left = divmod(self.batch_size * data, self._full(data))
        if left:
            raise RunError(
                f"a batch of {self.batch_size} does not divide over the {self._full(data)} devices "
                "along data of the full mesh; change train.batch_size"
            )
        if size == self.batch_size:
            return ()
        return f"train.batch_size={size}", f"train.rescaled_from={self.batch_size}"

    def _microbatches(self, data: int) -> int:
        full = self._full(data)
        least = -(-full * self.microbatches // data)
        for count in range(least, self.batch_size // data + 1):
            if self.batch_size % (data * count) == 0:
                return count
        raise RunError(
            f"a batch of {self.batch_size} cannot be divided over {data} devices along data and "
            f"{least} or more microbatches; change train.batch_size"
        )


@dataclass(frozen=True)
class GenerationPlan:
    """The plan of a generation: its hosts, their processes and its settings.

    Attributes:
      places: for each host with processes, the number of its first process and the number of its
        processes.
      total: the number of processes on all hosts.
      devices: the number of devices of all processes.
      settings: the settings of this generation, which replace settings of the config.
      idle: the names of the hosts that wait in reserve.
      snapshot: the host from which to fetch each part of the newest complete snapshot, by the
        part's name. The mapping is empty if no snapshot is complete.
    """

    places: Mapping[str, tuple[int, int]]
    total: int
    devices: int
    settings: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    snapshot: Mapping[str, str] = field(default_factory=dict)

    @property
    def hosts(self) -> int:
        """The number of hosts with processes."""
        return sum(count > 0 for _, count in self.places.values())


def make_plan(
    members: Sequence[HostFacts],
    rule: BatchRule,
    least: int,
    quarantined: Sequence[HostFacts] = (),
) -> GenerationPlan:
    """Return the plan of a generation of these hosts, in their order.

    Args:
      least: the smallest number of hosts with processes.
      quarantined: the hosts that are left out, but may have parts of a snapshot that the members
        lack.

    Raises:
      RunError: no number of hosts can form a mesh; the message gives the reason for each number.
    """
    reasons = []
    for count in range(len(members), least - 1, -1):
        chosen, idle = members[:count], members[count:]
        devices = sum(host.processes * host.devices for host in chosen)
        try:
            settings = rule.settings(devices)
        except RunError as error:
            reasons.append(f"with {count}: {error}")
            continue
        places, first = {}, 0
        for host in chosen:
            places[host.host] = first, host.processes
            first += host.processes
        places |= {host.host: (first, 0) for host in idle}
        names = tuple(host.name for host in (*idle, *quarantined))
        snapshot = newest_whole([*members, *quarantined])
        return GenerationPlan(places, first, devices, settings, names, snapshot)
    raise RunError(f"{len(members)} hosts cannot continue. {'; '.join(reasons)}")


def newest_whole(members: Sequence[HostFacts]) -> dict[str, str]:
    """Return, for each part of the members' newest complete snapshot, a host that has the part.

    The result is empty if no snapshot is complete.

    >>> a = HostFacts("a", "a", "", 1, 1, ("step_00000010.0_of_2", "step_00000020.0_of_2"))
    >>> b = HostFacts("b", "b", "", 1, 1, ("step_00000010.1_of_2",))
    >>> newest_whole([a, b])
    {'step_00000010.0_of_2': 'a', 'step_00000010.1_of_2': 'b'}
    """
    holders: dict[tuple[int, int], dict[str, str]] = {}
    for host in members:
        for name in host.parts:
            part = snapshot_of(name)
            if part is not None:
                step, _, count = part
                holders.setdefault((step, count), {}).setdefault(name, host.host)
    whole = [key for key, files in holders.items() if len(files) == key[1]]
    return holders[max(whole)] if whole else {}


def _count(size: Json) -> int:
    return size["dcn"] * size["ici"] if isinstance(size, Mapping) else size


def _shown(mesh: Mapping[str, Json]) -> str:
    return "{" + ", ".join(f"{axis}: {size}" for axis, size in mesh.items()) + "}"
