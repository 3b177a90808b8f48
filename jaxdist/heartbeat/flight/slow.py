"""Detection of a slow process that holds up the others, from what each process publishes.

Processes that take every step together have the same step time, so the step time identifies none of
them. These measures do, the most informative first:

1. The time of the main thread outside its wait for the devices: input, dispatch, copies, hooks. A
process that takes longer there starts its step later than the others.

2. The share of its heartbeats that were late: the process did not run when it should have (stopped
periodically, starved). Since the thread wakes at random moments, this share estimates the share of
time, except for the end of each stop, so it is a lower bound.

3. Which process is the last to finish a step, step after step, and by how much. The others wait at
least this long in the next collective; how much slower its devices are cannot be measured from
outside. The clocks must be the same, so only processes of one machine are compared.

A device is not detected if it is slow only within a collective, so that all devices are slow alike.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxdist.heartbeat.status import SLOW_PHASES, WAIT, Phase

LEAST_STEPS, LEAST_BEATS = 12, 30
EXCESS = 0.1
"""A process is reported if it takes longer than the others outside the wait, by this share of a
step."""
LATE_MORE = 0.15
"""A process is reported if its share of late heartbeats exceeds that of the others by this much."""
LAST_SHARE, BEHIND = 0.8, 0.05
"""A process is reported if it is the last at this share of the steps, by this share of a step on
average."""
_PASSED_OVER = frozenset(map(str, SLOW_PHASES))


@dataclass(frozen=True)
class Flight:
    """The record of one process over a while.

    Attributes:
      phases: its phases, in order.
      beats: the number of its heartbeats.
      late: the number of late heartbeats.
    """

    process: int
    phases: Sequence[Phase]
    beats: int = 0
    late: int = 0


@dataclass(frozen=True)
class Slow:
    """A slow process.

    Attributes:
      ratio: its time divided by the median of the others', by the measure that `why` names.
      least: whether the ratio is a lower bound.
      step: the last step that was considered.
    """

    process: int
    ratio: float
    why: str
    step: int
    least: bool = False

    def words(self) -> str:
        """Describe it for the user."""
        more = "at least " if self.least else ""
        return (
            f"process {self.process} is slow, {more}{self.ratio:.3g} times the others: {self.why}"
        )


def find_slow(found: Sequence[Flight]) -> list[Slow]:
    """Return the slow processes, each by the first of the three measures that shows it.

    The result is empty for fewer than two processes, or fewer than `LEAST_STEPS` steps that all
    have finished.
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
    """Return when each step was finished."""
    found: dict[int, int] = {}
    for one in phases[:-1]:
        if one.name == WAIT:
            found.setdefault(one.step, one.end)  # a wait that an error ended has the step before
    return found


def _own(phases: Sequence[Phase], begin: int, end: int) -> Counter[str]:
    """Return nanoseconds by phase between two moments, without waits and `SLOW_PHASES`."""
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
    told = f"{1e-6 * mine.total() / count:.3g} ms a step outside of its wait, theirs "
    told += f"{1e-6 * usual / count:.3g} of a step of {1e-6 * step_time:.3g}; most is {most}"
    return mine.total() / max(usual, 1), told.replace("_", " "), False


def _not_run(at: int, found: Sequence[Flight]) -> Told:
    if min(one.beats for one in found) < LEAST_BEATS:
        return None
    shares = [one.late / one.beats for one in found]
    usual = statistics.median(share for index, share in enumerate(shares) if index != at)
    if shares[at] - usual < LATE_MORE:
        return None
    told = f"it did not run for {shares[at]:.0%} of the time (stopped or starved), they {usual:.0%}"
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
        f"the last at {share:.0%} of the steps, by {1e-6 * behind:.3g} ms of {1e-6 * step_time:.3g}"
    )
    return step_time / max(step_time - behind, 0.01 * step_time), told, True
