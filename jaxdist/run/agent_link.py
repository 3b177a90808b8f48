"""A process of a run and the agent that has started it: what it says, and whether it may write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import jax

from jaxdist.checkpoint.identity import Identity
from jaxdist.checkpoint.snapshots import whole_steps
from jaxdist.heartbeat.fence import RunFence
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.heartbeat.status import Publisher
from jaxdist.metrics.account import Kind
from jaxdist.run.hooks.loop import LoopHook
from jaxdist.run.watch.told import Tell


class NoAgent:
    """The agent of a process that none has started: it is told nothing, and keeps nothing.

    Attributes:
      fence: of a run on several hosts: whether this generation may still write.
      memory: the folder of snapshots in this machine's memory.
      phase: told what the process's time goes to from now on.
      sees_failures: whether a failure of a process is written down, and the run begun anew.
    """

    fence: RunFence | None = None
    memory: Path | None = None
    phase: Callable[[Kind], None] | None = None
    sees_failures = False

    def admit(self) -> None:
        """Check that this process may write to the run.

        Raises:
          RunError: a later generation has begun.
        """
        if self.fence is not None:
            self.fence.check()

    @property
    def holds_snapshots(self) -> bool:
        """Whether there is a snapshot in memory to go on from."""
        return self.memory is not None and bool(whole_steps(self.memory))

    def hooks(self) -> Sequence[LoopHook]:
        """What tells it of steps."""
        return ()

    def done(self) -> None:
        """Tell that the run has come to its end, and is not to be begun anew."""


class Agent(NoAgent):
    """The agent that has started this process, as the process sees it."""

    sees_failures = True

    def __init__(self, run_folder: RunFolder, publisher: Publisher, fence: RunFence | None) -> None:
        self._run_folder, self._publisher = run_folder, publisher
        self.fence, self.memory, self.phase = fence, run_folder.snapshots, publisher.phase

    def hooks(self) -> Sequence[LoopHook]:
        """See `NoAgent`."""
        return (Tell(self._publisher.step, self._publisher.wait),)

    def done(self) -> None:
        """See `NoAgent`."""
        self._run_folder.done.touch()


@contextmanager
def watched(run_folder: RunFolder | None, run: Identity) -> Iterator[NoAgent]:
    """Tell the agent of this process, if there is one, which run this is and how it gets on."""
    if run_folder is None:
        yield NoAgent()
        return
    index = jax.process_index()
    if index == 0:
        run_folder.tell_run(run)
    assert run.path is not None
    fence = None if run_folder.fence is None else RunFence(run.path, run_folder.generation)
    if fence is not None and index == 0:
        fence.raise_()  # before anything of the run is read
    with Publisher(run_folder.status(index), index) as publisher:
        yield Agent(run_folder, publisher, fence)


def leaving(run_folder: RunFolder | None) -> Callable[[str], None]:
    """Tells the agent of this process, if there is one, that its machine is to stop, and why."""

    def tell(name: str) -> None:
        if run_folder is not None:
            with suppress(OSError):  # the agent is gone, and its folder
                run_folder.notice.write_text(name, encoding="utf-8")

    return tell
