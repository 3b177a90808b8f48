"""`jaxdist replay`: a second run whose servers receive messages in the recorded order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jaxdist.commands.evaluate import open_run, print_foreign_code
from jaxdist.commands.replay.lives import (
    RecordedLife,
    computed_again,
    life_of,
    shard_differences,
)
from jaxdist.config import read
from jaxdist.errors import CheckpointError, RunError
from jaxdist.experiment import Experiment
from jaxdist.metrics.report import write_json
from jaxdist.param_server.live.shard import ShardState
from jaxdist.param_server.processes.setup import sharded_run
from jaxdist.param_server.training.files import read_shard
from jaxdist.param_server.training.state import Sharded
from jaxdist.run.directory import RunDirectory


def replay(run: Path, console: Console, json_file: Path | None = None) -> bool:
    """Repeat a run from its last start, and return whether the same saved state is reached.

    Args:
      run: the run directory.
      console: the console for the comparison of each server's state.
      json_file: a file for the differences as JSON, or None to write none.

    Raises:
      RunError: the directory has no run with parameter servers or no saved state, or the run cannot
        be repeated.
      CheckpointError: the state from which the run last started no longer exists.
    """
    if not RunDirectory(run).occupied or not os.path.isdir(run / "order"):
        raise RunError(
            f"{run} is not a run with strategy.type parameter_server: it has no folder order/; "
            "name the directory of such a run"
        )
    print_foreign_code(read(RunDirectory(run).config).values, console)
    experiment, sharded = sharded_run(RunDirectory(run).config)
    life = life_of(run, len(sharded.layouts))
    start = _start(run, experiment, sharded, life, console)
    wanted = [read_shard(run, sharded, one, life.last) for one in sharded.layouts]
    found = computed_again(run, experiment, sharded, life, start)
    rows = [shard_differences(*pair) for pair in zip(found, wanted, strict=True)]
    _print(rows, sharded, life, wanted, console)
    clocks = {"first_clock": life.first, "last_clock": life.last}
    report = {"run": str(run), **clocks, "same": not any(rows), "differences": rows}
    write_json(json_file, report, what="comparison")
    return not any(rows)


def _start(
    run: Path, experiment: Experiment, sharded: Sharded, life: RecordedLife, console: Console
) -> list[ShardState]:
    if life.first == 0:
        return sharded.parted(experiment.program.init(), 0)
    if not sharded.keeps_moments:
        raise CheckpointError(
            f"the run was resumed at clock {life.first} from a saved state of the servers that no "
            f"longer exists. With strategy.consistency.type {sharded.cluster.consistency.type} "
            "only a run that was never resumed can be replayed"
        )
    step = life.first * sharded.cluster.local_steps
    _, restored = open_run(run, (), step=step, whole=True, console=console)
    return sharded.parted(restored.state, life.first)


def _print(
    rows: Sequence[list[str]],
    sharded: Sharded,
    life: RecordedLife,
    wanted: Sequence[ShardState],
    console: Console,
) -> None:
    table = Table("server", "updates", "parameters", "compared with the saved state")
    for differs, layout, shard in zip(rows, sharded.layouts, wanted, strict=True):
        told = "the same bits" if not differs else f"[bold red]differs:[/] {', '.join(differs)}"
        table.add_row(str(layout.server), f"{shard.version:,}", f"{layout.length:,}", told)
    console.print(
        f"clocks {life.first} to {life.last}, replayed from the order of pushes in order/"
    )
    console.print(table)
