"""What each host does in a generation: a function of plain data.

The mesh. The axes of the model (tensor, stage, context, expert) keep their sizes, and the data axis
takes what is left. The first hosts, in the order in which they came, are at work, as many of them
as a mesh exists for; the others wait, and are there at once when one is lost.

The batch. It stays as it is, so that every step takes the examples that it would have taken, in the
same order, and learns at the same rate. Where fewer devices share it, it is computed in more
microbatches: as few as leave no device with more rows at once than on the full mesh, and divide.
The full mesh is the one that the config writes; where it writes data: -1, that of the first
generation. So D devices along data take m microbatches, the least with D m >= D0 m0 and B a
multiple of D m, where D0, m0 and the batch B are the full mesh's. Or, as the config has it, the
batch is B D / D0, and each device has as many rows as on the full mesh.
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
    """What the plan must know of a host.

    Attributes:
      host: its name among all that ever were; `name` is for people.
      address: at which the others reach it.
      processes: that it can have, each with so many `devices`.
      parts: names of the files that it has of snapshots.
      copies: HOST:PORT at which it hands them out.
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
        """From what a host has said."""
        keys = ("name", "address", "processes", "devices", "copies")
        return cls(host, **{key: facts[key] for key in keys}, parts=tuple(facts["parts"]))


@dataclass(frozen=True)
class Rule:
    """What the config says of mesh and batch.

    Attributes:
      mesh: axis to size as written, in its order; a size over two networks is a mapping.
      batch_size: examples of a step.
      microbatches: pieces of it, on the full mesh.
      full: devices along data of the full mesh where the config writes -1; None: not known yet.
      rescales: whether the batch shrinks and grows with the mesh.
    """

    mesh: Mapping[str, Json]
    batch_size: int
    microbatches: int = 1
    full: int | None = None
    rescales: bool = False

    @classmethod
    def of(cls, values: JsonObject, full: int | None) -> Rule:
        """From the values of a config."""
        mesh, train = values.get("mesh") or {}, values.get("train") or {}
        sizes = {axis: size for axis, size in mesh.items() if axis in AXES and size is not None}
        given = train.get("batch_size"), train.get("microbatches", 1)
        numbers = [number if isinstance(number, int) and number > 0 else 1 for number in given]
        rescales = (values.get("elastic") or {}).get("batch") == "rescale"
        return cls(sizes or {DATA: -1}, numbers[0], numbers[1], full, rescales)

    @property
    def others(self) -> int:
        """Devices that all axes but data take."""
        return math.prod(_count(size) for axis, size in self.mesh.items() if axis != DATA)

    def data_size(self, devices: int) -> int:
        """Devices along data, of so many.

        Raises:
          RunError: they do not make a mesh.
        """
        fixed = {axis: size for axis, size in self.mesh.items() if axis != DATA}
        if -1 in fixed.values():
            raise RunError(
                f"an axis of the model has size -1 in the mesh {_shown(self.mesh)}: where hosts "
                "come and go only data may take what is left"
            )
        data = self.mesh.get(DATA, 1)
        if isinstance(data, Mapping) and devices != _count(data) * self.others:
            raise RunError(
                f"data lies over two networks in the mesh {_shown(self.mesh)}, of "
                f"{_count(data) * self.others} devices, and there are {devices}: write data as "
                "one number to let it shrink"
            )
        if devices % self.others or (DATA not in self.mesh and devices != self.others):
            whole = "a multiple of" if DATA in self.mesh else "the"
            raise RunError(
                f"{devices} devices are not {whole} {self.others} that the other axes of the mesh "
                f"{_shown(self.mesh)} take, which do not shrink"
            )
        return devices // self.others

    def settings(self, devices: int) -> tuple[str, ...]:
        """What replaces the config's own mesh and microbatches on so many devices.

        Raises:
          RunError: no mesh, or no number of microbatches exists for them.
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
        """Each device has as many rows as on the full mesh."""
        size, left = divmod(self.batch_size * data, self._full(data))
        if left:
            raise RunError(
                f"a batch of {self.batch_size} does not divide over the full mesh's "
                f"{self._full(data)} devices along data"
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
            f"a batch of {self.batch_size} does not divide over {data} devices along data in "
            f"{least} microbatches or more"
        )


@dataclass(frozen=True)
class Plan:
    """A generation.

    Attributes:
      places: by host, the number of its first process and how many it has.
      total: processes.
      devices: of all of them.
      settings: that replace the config's.
      idle: names of hosts that wait.
      snapshot: by file, the host that hands it out; empty where none is whole.
    """

    places: Mapping[str, tuple[int, int]]
    total: int
    devices: int
    settings: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    snapshot: Mapping[str, str] = field(default_factory=dict)

    @property
    def hosts(self) -> int:
        """How many are at work."""
        return sum(count > 0 for _, count in self.places.values())


def make_plan(
    members: Sequence[HostFacts],
    rule: Rule,
    least: int,
    quarantined: Sequence[HostFacts] = (),
) -> Plan:
    """The plan of a generation of these hosts, in their order.

    Args:
      least: hosts that must be at work.
      aside: hosts that are left out of it, and may have what the others lack of a snapshot.

    Raises:
      RunError: there is no mesh for any number of them; says why for each.
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
        return Plan(places, first, devices, settings, names, snapshot)
    raise RunError(f"{len(members)} hosts cannot go on. " + "; ".join(reasons))


def newest_whole(members: Sequence[HostFacts]) -> dict[str, str]:
    """By file, who has it, of the newest snapshot that the members hold together.

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
