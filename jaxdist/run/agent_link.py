"""The link of a process to its agent: reports to the agent, and the permission to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxdist.checkpoint.identity import Identity
from jaxdist.checkpoint.snapshots import whole_steps
from jaxdist.heartbeat.fence import RunFence
from jaxdist.heartbeat.run_folder import RunFolder
from jaxdist.heartbeat.status import Publisher
from jaxdist.metrics.account import Activity
from jaxdist.run.hooks.loop import LoopHook
from jaxdist.run.watch.reports import Tell


@dataclass(frozen=True)
class AgentLink:
    """The link of a process to the agent that started it; by default, there is no agent.

    Attributes:
      fence: the check that no later generation of a run on several hosts has started, or None for a
        run on a single host.
      memory: the directory of the snapshots in this machine's memory, or None if the run has no
        snapshots there.
      phase: the function that is called with each kind of work that the process begins, or None to
        call none.
      hooks: the hooks that report steps to the agent.
      finished: the file that tells the agent that the run has finished, or None without an agent.
    """

    fence: RunFence | None = None
    memory: Path | None = None
    phase: Callable[[Activity], None] | None = None
    hooks: Sequence[LoopHook] = ()
    finished: Path | None = None

    @property
    def sees_failures(self) -> bool:
        """Whether an agent records each failure of a process and then restarts the run."""
        return self.finished is not None

    def admit(self) -> None:
        """Check that this process may write to the run.

        Raises:
          RunError: a later generation has started.
        """
        if self.fence is not None:
            self.fence.check()

    @property
    def holds_snapshots(self) -> bool:
        """Whether this machine's memory holds a complete snapshot that the run can load."""
        return self.memory is not None and bool(whole_steps(self.memory))

    def done(self) -> None:
        """Report to the agent, if any, that the run has finished and must not be restarted."""
        if self.finished is not None:
            self.finished.touch()


@contextmanager
def watched(run_folder: RunFolder | None, run: Identity) -> Iterator[AgentLink]:
    """Yield the link of this process to its agent; there is no agent if `run_folder` is None.

    The agent receives the run's identity from process 0, and the progress of every process until
    the context ends.
    """
    if run_folder is None:
        yield AgentLink()
        return
    index = jax.process_index()
    if index == 0:
        run_folder.tell_run(run)
    assert run.path is not None
    fence = None if run_folder.fence is None else RunFence(run.path, run_folder.generation)
    if fence is not None and index == 0:
        # The fence is raised first, because this process will read files that a process of an
        # earlier generation may still write.
        fence.raise_()
    with Publisher(run_folder.status(index), index) as publisher:
        reports = (Tell(publisher.step, publisher.wait),)
        yield AgentLink(fence, run_folder.snapshots, publisher.phase, reports, run_folder.done)


def departure_reporter(run_folder: RunFolder | None) -> Callable[[str], None]:
    """Return a function that reports to an agent, if there is one, why this machine must stop."""

    def tell(name: str) -> None:
        if run_folder is not None:
            with suppress(OSError):  # The agent has ended, and its folder is gone.
                run_folder.notice.write_text(name, encoding="utf-8")

    return tell
