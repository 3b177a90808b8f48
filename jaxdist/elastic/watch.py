"""Who is stuck: a decision on what processes say of themselves, without a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxdist.heartbeat.status import SLOW_PHASES, Status
from jaxdist.metrics.account import Kind


@dataclass(frozen=True)
class StuckTimeouts:
    """How long a process may do nothing.

    Attributes:
      silent_seconds: without a sign of life.
      step_seconds: all processes at one step, and none of them getting on.
    """

    silent_seconds: float = 10.0
    step_seconds: float = 600.0


@dataclass(frozen=True)
class Stuck:
    """A process that keeps the others.

    Attributes:
      why: what it does in place of going on.
    """

    process: int
    why: str


def find_stuck(
    found: Sequence[Status],
    now: float,
    timeouts: StuckTimeouts,
    others: Callable[[], Sequence[Status] | None] = tuple,
) -> Stuck | None:
    """The process of this machine that all others wait for, where they have waited for too long.

    One that is silent is stopped or starved. Where all live and none gets on, it is the one that
    is furthest behind: at the lowest step, of these one that does not wait for it as the others do,
    of these one that is not at a step, and of these the one that got stuck first. Each machine
    names only its own: the one that has it ends it, and lets the others know.

    Args:
      others: processes of other machines, by this one's clock; None where one of them is not known
        yet. Asked only where those of this machine have waited for too long.
    """
    silent = [one for one in found if now - one.alive > timeouts.silent_seconds]
    if silent:
        first = min(silent, key=lambda one: one.alive)
        return Stuck(first.process, f"has not been heard for {now - first.alive:.0f} s")
    if not _still(found, now, timeouts):
        return None
    remote = others()
    if remote is None or not _still(remote, now, timeouts):
        return None
    everyone = [*found, *remote]
    if not any(one.phase not in SLOW_PHASES for one in everyone):
        return None
    behind = min(
        everyone, key=lambda one: (one.step, one.waiting, one.phase is Kind.STEP, one.since)
    )
    if behind not in found:
        return None
    waited = now - behind.since
    return Stuck(
        behind.process, f"is at {behind.phase} after step {behind.step} for {waited:.0f} s"
    )


def _still(found: Sequence[Status], now: float, timeouts: StuckTimeouts) -> bool:
    return all(now - one.since > timeouts.step_seconds for one in found)


def first_lost(codes: Sequence[int | None]) -> int | None:
    """The process that was lost first, of those that have ended since the last look.

    One that was killed comes before those that end because they miss it.

    >>> first_lost([3, -9, None]), first_lost([None, 3, 0]), first_lost([0, None])
    (1, 1, None)
    """
    ended = [at for at, code in enumerate(codes) if code]
    killed = [at for at in ended if (codes[at] or 0) < 0]
    return next(iter(killed + ended), None)
