"""The rows of the scoreboard by their numbers, and their table."""

from __future__ import annotations

import os
import time

from benchmarks.core.report import Listing, Report
from benchmarks.elastic import sigterm
from benchmarks.elastic.scoreboard import elsewhere, saves, strikes
from benchmarks.elastic.scoreboard.row import Row, Score
from jaxdist.errors import ConfigError, JaxdistError, did_you_mean


def told_to_stop(trials: int, seed: int) -> Row:
    """Try R20: SIGTERM; `benchmarks.elastic.sigterm` raises unless runs save and exit with 75."""
    found = sigterm.figure(trials, seed)
    words = f"{trials} runs saved and ended with exit code 75, after {found.ours:.2f} s at most"
    return Row(words, found.ours <= sigterm.GOAL_SECONDS)


SCORES = {
    "R01": Score("SIGKILL of a random process at a random step", "bit-equal; recovery median "
                 "<= 8 s, p95 <= 15 s", 30, strikes.lost_processes),
    "R04": Score("SIGSTOP of a generation, another goes on, SIGCONT", "every write of the old one "
                 "refused", 20, saves.woken_generations),
    "R08": Score("SIGKILL at a random system call of a save", "restores the newest committed step, "
                 "bit-equal", 100, saves.killed_saves),
    "R18": Score("4, 3, 5, 2 workers, the learning rate by the rule", "each sample once an epoch, "
                 "the rate by the rule, the loss within a band", 10, elsewhere.changed_workers),
    "R19": Score("SIGSTOP of a process", "named and evicted <= 10 s + 2 steps", 20,
                 strikes.stopped_processes),
    "R20": Score("SIGTERM", "a checkpoint and exit code 75 <= 10 s", 30, told_to_stop),
    "R27": Score("a random fault each 15 s (minutes)", "nobody helps; memory, files and folders "
                 "do not grow", 10, strikes.soak),
    "R28": Score("a fault each 60 s (minutes)", "goodput >= 80%", 10, strikes.rare_faults),
    "R29": Score("a bit flips in one replica", "found at the next comparison, the replica named",
                 100, elsewhere.flipped_bits),
}  # fmt: skip


def asked(text: str) -> dict[str, int]:
    """Return the number of trials of each requested row.

    >>> asked("R08=5,R29"), len(asked("all"))
    ({'R08': 5, 'R29': 100}, 9)

    Raises:
      ConfigError: a row does not exist, or a number of trials is not a positive integer.
    """
    found = {}
    for one in SCORES if text == "all" else text.split(","):
        name, equals, count = one.partition("=")
        if name not in SCORES:
            raise ConfigError(f"--scoreboard {one!r}: {did_you_mean(name, SCORES)}")
        if equals and not (count.isdigit() and int(count)):
            raise ConfigError(f"--scoreboard {one!r}: give a number of trials, such as {name}=5")
        found[name] = int(count) if equals else SCORES[name].trials
    return found


def scoreboard(text: str, seed: int = 0) -> Report:
    """Try the requested rows one after another, and report the errors of rows that fail."""
    rows = []
    for name, trials in asked(text).items():
        score, begun = SCORES[name], time.monotonic()
        try:
            row = score.run(trials, seed)
        except Exception as error:  # any error, since the other rows are still to be tried
            what = "" if isinstance(error, JaxdistError) else f"{type(error).__name__}: "
            row = Row(f"failed: {what}{str(error)[-300:]}", held=False)
        took = time.monotonic() - begun
        held = "yes" if row.held else "no"
        rows.append((name, score.what, trials, score.goal, row.came, held, took))
        print(f"{name} {held}: {row.came} ({took:.0f} s)", flush=True)
    columns = dict.fromkeys(("id", "what", "trials", "goal", "came to", "ok"), "") | {"took": "s"}
    load = os.getloadavg()[0]
    title = f"scoreboard, seed {seed}, {os.cpu_count()} cores, load {load:.1f} at the end"
    return Report("elastic", [], [Listing(title, columns, rows)])
