"""The tiers of a run's saved states: checkpoints, and snapshots, which take less time to make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import jax
from rich.markup import escape

from jaxdist.checkpoint.agree import any_process, broadcast_json
from jaxdist.checkpoint.layout import steps_present
from jaxdist.checkpoint.local import claim
from jaxdist.checkpoint.snapshots import Snapshots, load_snapshot, whole_steps
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.errors import CheckpointError
from jaxdist.run.directory import directory_identity
from jaxdist.run.files import RunFiles
from jaxdist.train.state import TrainState
from jaxdist.train.strategy.config import Hybrid
from jaxdist.types import Json

Say = Callable[[str], None]


@dataclass(frozen=True)
class Tier:
    """The snapshots of a run in one location.

    Attributes:
      where: the name of the location in messages.
      every: the number of steps between two snapshots, or "auto" if the run chooses the number.
      lasts: whether the snapshots survive a restart of the machine.
    """

    where: str
    snapshots: Snapshots
    every: int | str
    lasts: bool = False


@dataclass(frozen=True)
class Tiers:
    """The checkpoints of a run, and its tiers of snapshots, the fastest tier first."""

    store: CheckpointStore
    snapshots: Sequence[Tier] = ()

    def newest(
        self, shapes: TrainState, say: Say
    ) -> tuple[TrainState, Mapping[str, Json], str] | None:
        """Load the newest complete snapshot, if it is newer than all checkpoints.

        Return the snapshot's state, metadata and location, or None if there is no such snapshot. If
        any process cannot load a snapshot, all processes skip this snapshot and try an older
        snapshot.

        Args:
          say: the function that is called with a line for each snapshot that is skipped.
        """
        if not self.snapshots:
            return None
        saved = max(steps_present(self.store.directory), default=-1)
        # Among snapshots of the same step, the negated index puts the fastest tier first in the
        # descending order.
        found = [
            (step, -at)
            for at, tier in enumerate(self.snapshots)
            for step in whole_steps(tier.snapshots.folder)
            if step > saved
        ]
        # All processes try the snapshots that process 0 has found, so that they make the same
        # collective calls.
        for step, at in broadcast_json(sorted(found, reverse=True)):
            tier, loaded = self.snapshots[-at], None
            try:
                loaded = load_snapshot(tier.snapshots.folder, step, shapes)
            except CheckpointError as error:
                say(f"[bold red]skipped {tier.where}:[/] {escape(str(error))}")
            if not any_process(loaded is None):
                assert loaded is not None
                return *loaded, tier.where
        return None

    def forget(self, step: int) -> None:
        """Delete the snapshots after `step`, in tiers that survive a restart of the machine.

        A `step` of -1 deletes all of these snapshots.
        """
        for tier in self.snapshots:
            if tier.lasts:
                tier.snapshots.forget(step)


def open_tiers(files: RunFiles, say: Say, stack: ExitStack) -> Tiers:
    """Open the checkpoints and snapshot tiers of a config; both are closed when `stack` closes.

    Args:
      say: the function that is called with lines in rich's markup.
    """
    config, tiers = files.config.checkpoint, []
    store = stack.enter_context(files.store(lambda text: say(f"[bold red]checkpoint:[/] {text}")))
    memory = files.agent.memory
    # A snapshot has no tables, so a run with tables on servers could not continue from it.
    tables = isinstance(files.config.strategy, Hybrid)
    if memory is not None and config.memory_every is not None and not tables:
        tiers.append(Tier("in memory", _snapshots(memory, say, stack), config.memory_every))
    if config.local is not None:
        folder = claim(config.local.directory, directory_identity(files.directory))
        snapshots = _snapshots(folder, say, stack, lasts=True)
        tiers.append(Tier("on this machine's disk", snapshots, config.local.every, lasts=True))
    return Tiers(store, tiers)


def _snapshots(folder: Path, say: Say, stack: ExitStack, *, lasts: bool = False) -> Snapshots:
    given = (folder, jax.process_index(), jax.process_count(), say)
    return stack.enter_context(Snapshots(*given, lasts=lasts))
