"""The detection of stuck processes from the statuses that the processes publish."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxdist.heartbeat.status import SLOW_PHASES, Status
from jaxdist.metrics.account import Activity


@dataclass(frozen=True)
class StuckTimeouts:
    """The longest times for which a process may make no progress.

    Attributes:
      silent_seconds: the longest time without a heartbeat, in seconds.
      step_seconds: the longest time for which all processes may stay at the same step, in seconds.
    """

    silent_seconds: float = 10.0
    step_seconds: float = 600.0


@dataclass(frozen=True)
class Stuck:
    """A stuck process, for which the other processes wait.

    Attributes:
      why: a description of what the process does instead of steps, as a phrase that follows the
        name of the process in a sentence.
    """

    process: int
    why: str


def find_stuck(
    found: Sequence[Status],
    now: float,
    timeouts: StuckTimeouts,
    others: Callable[[], Sequence[Status] | None] = tuple,
) -> Stuck | None:
    """Return the stuck process of this machine, or None if no process is stuck on this machine.

    A process without a heartbeat is stuck, because it is stopped or gets no CPU time. If all
    processes have heartbeats, but none makes progress for too long, the process at the lowest step
    is stuck. If several processes are at that step, a process that does not wait for the devices is
    preferred. If this leaves several processes, a process that is not inside a step is preferred,
    and then the process whose progress ended first. No process is stuck while all processes compile
    or restore.

    Args:
      found: the processes of this machine.
      others: the function that returns the statuses of the processes of other machines, with times
        by this machine's clock, or None while a status is unknown. The function reads from the
        network, so it is called only if the processes of this machine have waited too long.
    """
    silent = [one for one in found if now - one.alive > timeouts.silent_seconds]
    if silent:
        first = min(silent, key=lambda one: one.alive)
        return Stuck(first.process, f"has sent no heartbeat for {now - first.alive:.0f} s")
    if not _still(found, now, timeouts):
        return None
    remote = others()
    if remote is None or not _still(remote, now, timeouts):
        return None
    everyone = [*found, *remote]
    # If all processes compile or restore, no process is stuck, since these phases have no time
    # limit.
    if not any(one.phase not in SLOW_PHASES for one in everyone):
        return None
    behind = min(
        everyone, key=lambda one: (one.step, one.waiting, one.phase is Activity.STEP, one.since)
    )
    if behind not in found:
        return None
    waited = now - behind.since
    return Stuck(
        behind.process,
        (f"has been in phase {behind.phase} after step {behind.step} for {waited:.0f} s"),
    )


def _still(found: Sequence[Status], now: float, timeouts: StuckTimeouts) -> bool:
    return all(now - one.since > timeouts.step_seconds for one in found)


def first_lost(codes: Sequence[int | None]) -> int | None:
    """Return the index of the process that failed first, among the processes that have ended.

    Return None if no process has failed.

    A process that a signal killed counts as earlier than a process that exited with an error, since
    the exit may be a consequence of the kill.

    >>> first_lost([3, -9, None]), first_lost([None, 3, 0]), first_lost([0, None])
    (1, 1, None)
    """
    ended = [at for at, code in enumerate(codes) if code]
    killed = [at for at in ended if (codes[at] or 0) < 0]
    return next(iter(killed + ended), None)
