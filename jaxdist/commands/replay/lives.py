"""A check of recorded runs: an uninterrupted part of a run is computed again from its files."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.checkpoint.layout import steps_present
from jaxdist.config.files import parse_json, read_regular, why_unread
from jaxdist.data.loader import DeviceBatch
from jaxdist.errors import RunError
from jaxdist.experiment import Experiment
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.live.order import rack_log, read_order, server_log
from jaxdist.param_server.live.shard import ShardState
from jaxdist.param_server.processes.parts import part_of
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.param_server.training.files import directory_of
from jaxdist.param_server.training.replay import BatchesOf, Replay
from jaxdist.param_server.training.state import Sharded
from jaxdist.param_server.training.worker import PushComputation, computation
from jaxdist.trees import flatten_with_names


@dataclass(frozen=True)
class RecordedLife:
    """An uninterrupted part of a recorded run of parameter servers.

    Attributes:
      first: the first clock of the part.
      last: the newest clock at which all servers saved their state.
      slots: for each client, the number of the part of each batch that the client computes.
    """

    first: int
    last: int
    slots: dict[int, int]


def life_of(run: Path, servers: int) -> RecordedLife:
    """Return the newest uninterrupted part of a run that ends with a saved state of all servers.

    Raises:
      RunError: there is no such part.
    """
    saved = [set(steps_present(directory_of(run, at))) for at in range(servers)]
    clocks = set.intersection(*saved)
    found = (re.fullmatch(r"server_0\.from_(\d+)", path.stem) for path in (run / "order").iterdir())
    begun = [int(match[1]) for match in found if match is not None]
    if not clocks or not any(first < max(clocks) for first in begun):
        raise RunError(
            f"{run}: the servers of the run have not yet saved a state with which a replay could "
            "be compared; wait for the first checkpoint"
        )
    last = max(clocks)
    first = max(first for first in begun if first < last)
    path = run / "order" / "clients.jsonl"
    try:
        told: Any = [*map(parse_json, read_regular(path).splitlines())]
        slots = {one["client"]: one["slot"] for one in told if one["first"] == first}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} does not record the actions of each worker ({why_unread(error)}): restore the "
            "file from a copy; without the file the run cannot be replayed"
        ) from error
    return RecordedLife(first, last, slots)


def computed_again(
    run: Path,
    experiment: Experiment,
    sharded: Sharded,
    life: RecordedLife,
    start: Sequence[ShardState],
) -> list[ShardState]:
    """Compute the servers' state at the end of a part of a run from the recorded order.

    Args:
      start: the servers' state at the beginning of the part.

    Raises:
      RunError: an order log cannot be read, or belongs to another run.
    """
    cluster, order, servers = sharded.cluster, run / "order", range(len(start))
    clients = cluster.clients
    states = [RangeState(Clocks(clients, version=one.version, floor=one.floor)) for one in start]
    logs = [read_order(order / server_log(at, life.first)) for at in servers]
    racks = [
        [read_order(order / rack_log(rack, at, life.first)) for rack in range(len(cluster.racks))]
        for at in servers
    ]
    given = _work_of(experiment, sharded, life)
    again = Replay(sharded, [*start], states, logs, *given, racks=racks, due=life.last)
    again.run()
    return [*again.reached]


def _work_of(
    experiment: Experiment, sharded: Sharded, life: RecordedLife
) -> tuple[Callable[[int], PushComputation], BatchesOf]:
    parts = {slot: part_of(experiment, sharded, slot) for slot in set(life.slots.values())}
    steps = sharded.cluster.local_steps

    def work(client: int) -> PushComputation:
        slot = life.slots[client]
        return computation(sharded, parts[slot][1], slot)

    def batches(client: int, clock: int) -> Sequence[DeviceBatch]:
        loader, _ = parts[life.slots[client]]
        return [loader.batch(clock * steps + step) for step in range(steps)]

    return work, batches


def shard_differences(found: ShardState, wanted: ShardState) -> list[str]:
    """Return the names of the values that differ in any bit between two states of a shard."""
    differs = [] if found.version == wanted.version else ["version"]
    pairs = zip(
        flatten_with_names({"params": found.params, "optimizer": found.optimizer}),
        flatten_with_names({"params": wanted.params, "optimizer": wanted.optimizer}),
        strict=True,
    )
    for (name, one), (_, other) in pairs:
        # Bytes are compared, since a NaN is not equal to itself, and -0.0 is equal to 0.0.
        if np.asarray(one).tobytes() != np.asarray(other).tobytes():
            differs.append(name)
    return differs
