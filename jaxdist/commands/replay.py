"""`jaxdist replay`: a repetition of a run with parameter servers, from its recorded order."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxdist.checkpoint.layout import steps_present
from jaxdist.commands.evaluate import open_run
from jaxdist.config import read
from jaxdist.config.files import parse_json, read_regular, why_unread
from jaxdist.config.importing import foreign_code
from jaxdist.data.loader import DeviceBatch
from jaxdist.errors import CheckpointError, RunError
from jaxdist.experiment import Experiment
from jaxdist.param_server.consistency.contract import Clocks
from jaxdist.param_server.live.order import read_order
from jaxdist.param_server.processes.parts import part_of
from jaxdist.param_server.processes.setup import sharded_run
from jaxdist.param_server.protocol.server import RangeState
from jaxdist.param_server.training.files import directory_of, read_shard
from jaxdist.param_server.training.replay import BatchesOf, Replay
from jaxdist.param_server.training.state import Sharded, ShardState
from jaxdist.param_server.training.worker import Computation, computation
from jaxdist.run.directory import RunDirectory
from jaxdist.trees import flatten_with_names


@dataclass(frozen=True)
class Life:
    """A part of a run without interruption.

    Attributes:
      first: its first clock.
      last: the newest clock that all its servers saved.
      slots: the part of each batch of every client.
    """

    first: int
    last: int
    slots: dict[int, int]


def replay(run: Path, console: Console) -> bool:
    """Repeat a run from its last start; return whether its servers' last saved state is reproduced.

    Raises:
      RunError: no run with parameter servers, no saved state, or a run that cannot be repeated.
      CheckpointError: the state at its start no longer exists.
    """
    if not RunDirectory(run).occupied or not os.path.isdir(run / "order"):
        raise RunError(f"{run} is no run with strategy.type parameter_server: it has no order/")
    for text in foreign_code(read(RunDirectory(run).config).values):
        console.print(f"code   {text}", soft_wrap=True, markup=False)
    experiment, sharded = sharded_run(RunDirectory(run).config)
    workers = sharded.cluster.workers
    life = life_of(run, len(sharded.layouts))
    start = _start(run, experiment, sharded, life, console)
    wanted = [read_shard(run, sharded, one, life.last) for one in sharded.layouts]
    states = [RangeState(Clocks(workers, version=one.version, floor=one.floor)) for one in start]
    logs = [
        read_order(run / "order" / f"server_{at}.from_{life.first}.jsonl")
        for at in range(len(start))
    ]
    given = _work_of(experiment, sharded, life)
    again = Replay(sharded, start, states, logs, *given, due=life.last)
    again.run()
    rows = [_compared(*pair) for pair in zip(again.reached, wanted, strict=True)]
    _print(rows, sharded, life, wanted, console)
    return not any(rows)


def life_of(run: Path, servers: int) -> Life:
    """Return the newest part of a run with a saved state.

    Raises:
      RunError: there is no such part.
    """
    saved = [set(steps_present(directory_of(run, at))) for at in range(servers)]
    clocks = set.intersection(*saved)
    found = (re.fullmatch(r"server_0\.from_(\d+)", path.stem) for path in (run / "order").iterdir())
    begun = [int(match[1]) for match in found if match is not None]
    if not clocks or not any(first < max(clocks) for first in begun):
        raise RunError(f"{run}: its servers have saved nothing yet that could be compared")
    last = max(clocks)
    first = max(first for first in begun if first < last)
    path = run / "order" / "clients.jsonl"
    try:
        told: Any = [*map(parse_json, read_regular(path).splitlines())]
        slots = {one["client"]: one["slot"] for one in told if one["first"] == first}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{path} does not tell which worker did what ({why_unread(error)}): restore it from a "
            "copy; without it the run cannot be computed again"
        ) from error
    return Life(first, last, slots)


def _start(
    run: Path, experiment: Experiment, sharded: Sharded, life: Life, console: Console
) -> list[ShardState]:
    if life.first == 0:
        return sharded.parted(experiment.program.init(), 0)
    if not sharded.keeps_moments:
        raise CheckpointError(
            f"this part of the run began at clock {life.first} with what its servers had saved, "
            "and that is not there any more: only runs that were not resumed can be computed again "
            f"with strategy.consistency.type {sharded.cluster.consistency.type}"
        )
    step = life.first * sharded.cluster.local_steps
    _, restored = open_run(run, (), step=step, console=console)
    return sharded.parted(restored.state, life.first)


def _work_of(
    experiment: Experiment, sharded: Sharded, life: Life
) -> tuple[Callable[[int], Computation], BatchesOf]:
    parts = {slot: part_of(experiment, sharded, slot) for slot in set(life.slots.values())}
    steps = sharded.cluster.local_steps

    def work(client: int) -> Computation:
        slot = life.slots[client]
        return computation(sharded, parts[slot][1], slot)

    def batches(client: int, clock: int) -> Sequence[DeviceBatch]:
        loader, _ = parts[life.slots[client]]
        return [loader.batch(clock * steps + step) for step in range(steps)]

    return work, batches


def _compared(found: ShardState, wanted: ShardState) -> list[str]:
    """List the differences by name."""
    differs = [] if found.version == wanted.version else ["version"]
    pairs = zip(
        flatten_with_names({"params": found.params, "optimizer": found.optimizer}),
        flatten_with_names({"params": wanted.params, "optimizer": wanted.optimizer}),
        strict=True,
    )
    for (name, one), (_, other) in pairs:
        if np.asarray(one).tobytes() != np.asarray(other).tobytes():
            differs.append(name)
    return differs


def _print(
    rows: Sequence[list[str]],
    sharded: Sharded,
    life: Life,
    wanted: Sequence[ShardState],
    console: Console,
) -> None:
    table = Table("server", "updates", "parameters", "beside what it saved")
    for differs, layout, shard in zip(rows, sharded.layouts, wanted, strict=True):
        told = "the same bits" if not differs else f"[bold red]differs:[/] {', '.join(differs)}"
        table.add_row(str(layout.server), f"{shard.version:,}", f"{layout.length:,}", told)
    console.print(f"clocks {life.first} to {life.last}, computed again from order/")
    console.print(table)
