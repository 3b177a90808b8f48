"""The use of a run's time by activity, computed from the records of all its attempts.

An attempt is the work of a process on the run, from the process's start to its last record. A
process that resumes from a checkpoint begins another attempt. If a run has several processes, only
process 0 has attempts. Each record of time has the content of the account at that time, so the time
of a killed run is known up to its last record. In names and files an attempt is called a life.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from jaxdist.metrics.account import Account, Activity
from jaxdist.types import Json, JsonObject

SPLIT, INTERVALS = "goodput", "intervals"
"""The splits of two kinds of records: of time, and of the save intervals that a run chose."""
WORK = (
    Activity.STEP,
    Activity.INPUT_WAIT,
    Activity.EVALUATION,
    Activity.CHECKPOINT_BLOCKED,
    Activity.SNAPSHOT,
    Activity.REPLICA_CHECK,
)
"""The activities whose time becomes lost work if a later attempt repeats their steps. The time of a
start, for example, never becomes lost work.
"""

_SAVES = (Activity.CHECKPOINT_BLOCKED, Activity.SNAPSHOT)
_STARTS = (Activity.START, Activity.RECOVERY, Activity.COMPILE)
Seconds = Mapping[Activity, float]
Record = Mapping[str, Json]


def account_values(account: Account, life: int) -> dict[str, float]:
    """Return a record of an account's current content.

    Args:
      life: the number of this attempt of the run, counted from 1.
    """
    spent = account.spent()
    wall = sum(spent.values())
    return {
        "life": life,
        "wall_seconds": 1e-9 * wall,
        "goodput": spent[Activity.STEP] / wall if wall else 0.0,
        **{f"spent_{kind}_seconds": 1e-9 * nanoseconds for kind, nanoseconds in spent.items()},
    }


def next_life(records: Iterable[Record]) -> int:
    """Return the number of the attempt that follows the recorded attempts, counted from 1."""
    return 1 + max((int(record["life"]) for record in records if _is_ours(record)), default=0)


@dataclass(frozen=True)
class Life:
    """An attempt of a run: the work of a process from its start to its last record.

    Attributes:
      number: the number of the attempt, counted from 1.
      began: the start of the attempt, in seconds since 1970.
      first_step: the number of steps that were taken before the attempt.
      last_step: the step of the attempt's last record.
      kept_step: the last step of the attempt that no later attempt repeated. If later attempts
        repeated all steps of the attempt, the value is below `first_step`.
      seconds: the seconds of the attempt by activity; their sum is the wall time.
    """

    number: int
    began: float
    first_step: int
    last_step: int
    kept_step: int
    seconds: Seconds

    @property
    def wall_seconds(self) -> float:
        """The seconds from the process's start to the attempt's last record."""
        return sum(self.seconds.values())

    @property
    def ended(self) -> float:
        """The time of the attempt's last record, in seconds since 1970."""
        return self.began + self.wall_seconds


@dataclass(frozen=True)
class Goodput:
    """The use of a run's time by activity, over all attempts.

    Attributes:
      lives: the attempts of the run in order; there is at least one.
    """

    lives: tuple[Life, ...]

    @property
    def gaps_seconds(self) -> tuple[float, ...]:
        """The seconds from the last record of each attempt to the start of the next attempt."""
        return tuple(max(after.began - before.ended, 0.0) for before, after in pairwise(self.lives))

    @property
    def seconds(self) -> dict[Activity, float]:
        """The seconds of all attempts by activity; the gaps between attempts count as idle."""
        found = {kind: sum(life.seconds[kind] for life in self.lives) for kind in Activity}
        found[Activity.IDLE] += sum(self.gaps_seconds)
        return found

    @property
    def wall_seconds(self) -> float:
        """The seconds from the first process's start to the last record."""
        return sum(life.wall_seconds for life in self.lives) + sum(self.gaps_seconds)

    @property
    def goodput(self) -> float:
        """The share of the wall time that was spent on steps that were not lost, from 0 to 1."""
        return self.seconds[Activity.STEP] / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def kept(self) -> float:
        """The share of the time that was not lost to failures and saves, from 0 to 1.

        The first start, its compilation, and the end of the run do not count as time. If no other
        time is left, the share is 1. The closed forms of `jaxdist.heartbeat.intervals` predict this
        share.
        """
        seconds, first = self.seconds, self.lives[0].seconds
        useful = sum(seconds[kind] for kind in WORK if kind not in _SAVES)
        taken = sum(seconds[kind] for kind in (*_SAVES, Activity.LOST_WORK))
        taken += sum(seconds[kind] - first[kind] for kind in _STARTS) + sum(self.gaps_seconds)
        return useful / (useful + taken) if useful + taken else 1.0

    @property
    def lost_steps(self) -> int:
        """The number of steps that were lost; a step that was lost twice counts twice."""
        return sum(life.last_step - max(life.kept_step, life.first_step) for life in self.lives)

    def as_json(self) -> JsonObject:
        """Return the use of the run's time as plain data for JSON."""
        return {
            "wall_seconds": self.wall_seconds,
            "goodput": self.goodput,
            "seconds": _named(self.seconds),
            "lost_steps": self.lost_steps,
            "gaps_seconds": list(self.gaps_seconds),
            "lives": [
                {
                    "life": life.number,
                    "began": life.began,
                    "first_step": life.first_step,
                    "last_step": life.last_step,
                    "kept_step": life.kept_step,
                    "wall_seconds": life.wall_seconds,
                    "seconds": _named(life.seconds),
                }
                for life in self.lives
            ],
        }


def joined_lives(records: Iterable[Record]) -> Goodput | None:
    """Return the use of time in all attempts of a run, or None if no record has times.

    If a later attempt resumed from a step, the earlier work after this step is lost work: the
    steps, and everything that was done between the steps.

    Args:
      records: the records of the run's metrics, in order.
    """
    ours = (record for record in records if _is_ours(record))
    lives = [list(group) for _, group in groupby(ours, key=lambda record: record["life"])]
    starts = [group[0]["step"] for group in lives]
    found = []
    for at, group in enumerate(lives):
        kept_step = min([group[-1]["step"], *starts[at + 1 :]])
        found.append(_life(group, kept_step))
    return Goodput(tuple(found)) if found else None


def _life(records: Sequence[Record], kept_step: int) -> Life:
    last = records[-1]
    seconds = _seconds(last)
    kept = [record for record in records if record["step"] <= kept_step]
    # An attempt keeps no work if a later attempt resumed from a step before its first step.
    until = _seconds(kept[-1]) if kept else dict.fromkeys(Activity, 0.0)
    if last["step"] > kept_step:
        seconds[Activity.LOST_WORK] = sum(seconds[kind] - until[kind] for kind in WORK)
        seconds |= {kind: until[kind] for kind in WORK}
    began = last["time"] - last["wall_seconds"]
    return Life(int(last["life"]), began, records[0]["step"], last["step"], kept_step, seconds)


def _is_ours(record: Record) -> bool:
    return record["split"] == SPLIT and "life" in record


def _seconds(record: Record) -> dict[Activity, float]:
    return {kind: float(record.get(f"spent_{kind}_seconds", 0.0)) for kind in Activity}


def _named(seconds: Seconds) -> JsonObject:
    return {kind.value: spent for kind, spent in seconds.items()}


def predicted(records: Iterable[Record]) -> float | None:
    """Return the newest prediction of the share of a run's time in which the run does not save.

    The result is None if the run did not choose the intervals between its saves.

    The shares for snapshots and for checkpoints are multiplied, since each share applies to the
    time that the other kind of saves leaves.

    >>> predicted([{"split": "intervals", "snapshot_predicted": 0.9},
    ...            {"split": "intervals", "checkpoint_blocked_predicted": 0.5}])
    0.45
    """
    last: dict[str, float] = {}
    for record in records:
        if record["split"] == INTERVALS:
            last |= {key: value for key, value in record.items() if key.endswith("_predicted")}
    return math.prod(last.values()) if last else None


def goodput_table(found: Goodput) -> str:
    """Return lines, of at most 80 columns, with the seconds and the share of each activity.

    Activities that took no time are left out.

    >>> seconds = {k: 0.0 for k in Activity} | {Activity.STEP: 8.0, Activity.IDLE: 2.0}
    >>> print(goodput_table(Goodput((Life(1, 0.0, 0, 9, 9, seconds),))))
    time   10.0 s in 1 attempt; goodput 80.0%
           step                      8.0 s   80.0%
           idle                      2.0 s   20.0%
    """
    wall, count = found.wall_seconds, len(found.lives)
    lives = "1 attempt" if count == 1 else f"{count} attempts"
    lost = f", {found.lost_steps} steps repeated" if found.lost_steps else ""
    head = f"time   {wall:,.1f} s in {lives}{lost}; goodput {found.goodput:.1%}"
    rows = [
        f"       {kind.replace('_', ' '):<18} {spent:>10,.1f} s {spent / wall:>7.1%}"
        for kind, spent in found.seconds.items()
        if spent >= 0.05
    ]
    return "\n".join([head, *rows])
