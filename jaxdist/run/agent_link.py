"""A process of a run that an agent has started: what it says, its snapshots, and its batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from rich.markup import escape

from jaxdist.checkpoint.agree import any_process, broadcast_json
from jaxdist.checkpoint.identity import Identity
from jaxdist.checkpoint.layout import steps_present
from jaxdist.checkpoint.snapshots import Snapshots, load, whole_steps
from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.errors import CheckpointError
from jaxdist.experiment import Experiment, build
from jaxdist.heartbeat.fence import RunFence
from jaxdist.heartbeat.place import Place
from jaxdist.heartbeat.status import Publisher
from jaxdist.mesh import Device
from jaxdist.train.rescale import KEY, extended
from jaxdist.train.state import TrainState
from jaxdist.types import Json

if TYPE_CHECKING:
    from jaxdist.run.job import RunJob


@dataclass(frozen=True)
class Watcher:
    """Whom a process tells what it does.

    Attributes:
      fence: of a run on several hosts: whether this generation may still write.
    """

    place: Place
    publisher: Publisher
    fence: RunFence | None = None

    def snapshots(self, say: Callable[[str], None]) -> Snapshots:
        """What this process keeps in memory."""
        return Snapshots(self.place.snapshots, jax.process_index(), jax.process_count(), say)


@contextmanager
def watched(place: Place | None, run: Identity) -> Iterator[Watcher | None]:
    """Tell the agent of this process, if there is one, which run this is and how it gets on."""
    if place is None:
        yield None
        return
    index = jax.process_index()
    if index == 0:
        place.tell_run(run)
    assert run.path is not None
    fence = None if place.fence is None else RunFence(run.path, place.generation)
    if fence is not None and index == 0:
        fence.raise_()  # before anything of the run is read
    with Publisher(place.status(index), index) as publisher:
        yield Watcher(place, publisher, fence)


def leaving(place: Place | None) -> Callable[[str], None]:
    """Tells the agent of this process, if there is one, that its machine is to stop, and why."""

    def tell(name: str) -> None:
        if place is not None:
            with suppress(OSError):  # the agent is gone, and its folder
                place.notice.write_text(name, encoding="utf-8")

    return tell


def restored(
    tiers: Mapping[str, Path], disk: CheckpointStore, shapes: TrainState, say: Callable[[str], None]
) -> tuple[TrainState, Mapping[str, Json], str] | None:
    """The newest snapshot that is whole, where it is newer than each checkpoint; and where it was.

    All processes decide alike: what one cannot load none takes.

    Args:
      tiers: folders by what to call them; of one step the first is taken.
    """
    saved = max(steps_present(disk.directory), default=-1)
    found = [
        (step, -at, where)
        for at, (where, folder) in enumerate(tiers.items())
        for step in whole_steps(folder)
        if step > saved
    ]
    for step, _, where in broadcast_json(sorted(found, reverse=True)):
        loaded = None
        try:
            loaded = load(tiers[where], step, shapes)
        except CheckpointError as error:
            say(f"[bold red]passed over {where}:[/] {escape(str(error))}")
        if not any_process(loaded is None):
            assert loaded is not None
            return *loaded, where
    return None


def continued(
    job: RunJob, start: int, metadata: Mapping[str, Json], devices: Sequence[Device] | None
) -> Experiment:
    """The run from a step on, built anew: where in the data it stands, and how fast it learns.

    Args:
      metadata: what was kept beside the state.
    """
    train = job.config.train
    sizes = extended(metadata.get(KEY), start, train.batch_size, train.full_batch_size)
    job.kept = {KEY: [[*one] for one in sizes]}
    experiment = build(job.config, job.document, devices=devices, sizes=sizes)
    for line in experiment.explained if len(sizes) > 1 else ():
        job.console.print(line, soft_wrap=True)
    return experiment
