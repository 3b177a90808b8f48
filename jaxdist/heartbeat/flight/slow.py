"""The detection of a process that is slow and delays other processes, from all statuses.

Processes that take every step together have the same step time, so the step time does not show
which process is slow. Three measures show the slow process; the first measure gives the most
information:

1. The first measure is the main thread's time outside its wait for the devices: input, dispatch,
copies, hooks. A process that spends more time outside the wait starts its step later than the other
processes.

2. The second measure is the share of a process's heartbeats that were late because the process did
not run (stopped periodically, starved). The thread of the heartbeats wakes at random moments. This
share therefore estimates the share of time in which the process did not run. The estimate is a
lower bound, because the end of each stop is not counted.

3. The third measure is how often a process is the last to finish a step, and with how much delay.
The other processes wait at least for this delay in the next collective; the measure cannot show how
much slower the devices are. The measure compares times of one clock, so it compares only processes
of the same machine.

A device that is slow only within a collective, which slows all devices alike, is not detected.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdist.heartbeat.status import SLOW_PHASES, WAIT, Phase

LEAST_STEPS, LEAST_BEATS = 12, 30
EXCESS = 0.1
"""The share of a step that a slow process spends outside its wait for the devices, in addition to
the median of the other processes."""
LATE_MORE = 0.15
"""The share of late heartbeats that a slow process has, in addition to the median of the other
processes.
"""
LAST_SHARE, BEHIND = 0.8, 0.05
"""LAST_SHARE: the share of steps that a slow process finishes last. BEHIND: the mean delay of a
slow process, as a share of a step."""
_PASSED_OVER = frozenset(map(str, SLOW_PHASES))


@dataclass(frozen=True)
class Flight:
    """The recent record of one process.

    Attributes:
      phases: the last phases of the process, in order.
      beats: the number of heartbeats since the last check.
      late: the number of late heartbeats since the last check.
    """

    process: int
    phases: Sequence[Phase]
    beats: int = 0
    late: int = 0


@dataclass(frozen=True)
class Slow:
    """A slow process, and the measure that shows that the process is slow.

    Attributes:
      ratio: the time of the process divided by the median time of the other processes.
      why: the measure that shows the slow process, with the measured numbers.
      step: the last step on which the measure is based.
      least: whether the ratio is only a lower bound.
    """

    process: int
    ratio: float
    why: str
    step: int
    least: bool = False

    def words(self) -> str:
        """Return a description of the slow process for the user."""
        more = "at least " if self.least else ""
        return (
            f"process {self.process} is {more}{self.ratio:.3g} times as slow as the other "
            f"processes: {self.why}"
        )


def find_slow(found: Sequence[Flight]) -> list[Slow]:
    """Return the slow processes, each with the first measure that shows that it is slow.

    The measures are, in this order: the time outside of waits, the late heartbeats, and the number
    of steps that the process finishes last.

    The result is empty if there are fewer than two processes, or if the processes have finished
    fewer than `LEAST_STEPS` common steps.
    """
    done = [_done(one.phases) for one in found]
    steps = sorted(set.intersection(*map(set, done))) if done else []
    if len(found) < 2 or len(steps) < LEAST_STEPS:
        return []
    spans = [(times[steps[0]], times[steps[-1]]) for times in done]
    count = len(steps) - 1
    step_time = statistics.median(end - begin for begin, end in spans) / count
    own = [_own(one.phases, *span) for one, span in zip(found, spans, strict=True)]
    slow = []
    for at, one in enumerate(found):
        given = (
            _outside(at, own, count, step_time)
            or _not_run(at, found)
            or _last(at, done, steps, step_time)
        )
        if given is not None:
            slow.append(Slow(one.process, given[0], given[1], steps[-1], least=given[2]))
    return slow


def _done(phases: Sequence[Phase]) -> dict[int, int]:
    """Return the time, in nanoseconds, at which a process finished each step, by step."""
    found: dict[int, int] = {}
    for one in phases[:-1]:
        if one.name == WAIT:
            # Only the first wait of a step counts, because after a wait that an error ends, the
            # number of the step stays the same.
            found.setdefault(one.step, one.end)
    return found


def _own(phases: Sequence[Phase], begin: int, end: int) -> Counter[str]:
    """Return the nanoseconds of each phase between two moments, without waits and `SLOW_PHASES`."""
    spent: Counter[str] = Counter()
    for one in phases:
        inside = min(one.end, end) - max(one.begin, begin)
        if inside > 0 and one.name != WAIT and one.name not in _PASSED_OVER:
            spent[one.name] += inside
    return spent


Told = tuple[float, str, bool] | None


def _outside(at: int, own: Sequence[Counter[str]], count: int, step_time: float) -> Told:
    mine, others = own[at], [one for index, one in enumerate(own) if index != at]
    usual = statistics.median(one.total() for one in others)
    excess = mine.total() - usual
    if excess < EXCESS * step_time * count:
        return None
    more = {name: spent - statistics.median(one[name] for one in others)
            for name, spent in mine.items()}  # fmt: skip
    most = max(more, key=lambda name: more[name])
    told = (
        f"{1e-6 * mine.total() / count:.3g} ms of work in each step of {1e-6 * step_time:.3g} ms, "
        "while the median of the other processes is "
    )
    told += f"{1e-6 * usual / count:.3g} ms; the phase with the largest difference is {most}"
    return mine.total() / max(usual, 1), told.replace("_", " "), False


def _not_run(at: int, found: Sequence[Flight]) -> Told:
    if min(one.beats for one in found) < LEAST_BEATS:
        return None
    shares = [one.late / one.beats for one in found]
    usual = statistics.median(share for index, share in enumerate(shares) if index != at)
    if shares[at] - usual < LATE_MORE:
        return None
    told = (
        f"the process did not run for {shares[at]:.0%} of the time (it was stopped or got no CPU), "
        f"while the median of the other processes is {usual:.0%}"
    )
    runs = max(1 - shares[at], 1 / (found[at].beats + 1))
    return (1 - usual) / runs, told, True


def _last(at: int, done: Sequence[dict[int, int]], steps: Sequence[int], step_time: float) -> Told:
    behind, last = 0.0, 0
    for step in steps:
        others = [times[step] for index, times in enumerate(done) if index != at]
        behind += (done[at][step] - statistics.median(others)) / len(steps)
        last += done[at][step] > max(others)
    share = last / len(steps)
    if share < LAST_SHARE or behind < BEHIND * step_time:
        return None
    told = (
        f"the process finished last in {share:.0%} of the steps, on average {1e-06 * behind:.3g} "
        f"ms after the others in a step of {1e-06 * step_time:.3g} ms"
    )
    return step_time / max(step_time - behind, 0.01 * step_time), told, True
