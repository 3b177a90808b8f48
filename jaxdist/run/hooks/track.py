"""A hook that passes a run's records to a tracker; an error of the tracker does not end the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxdist.config.files import read_json, replace_text
from jaxdist.config.importing import describe_exception
from jaxdist.metrics.trackers.contract import Status, Tracked, Tracker
from jaxdist.run.hooks.contract import Hook, Outcome, Run
from jaxdist.types import JsonObject

KEPT, VERSIONS = "trackers.json", "versions.json"
GIVEN_UP = 3
"""The number of consecutive failures after which a tracker is not called again, because each call
may wait for a network for a long time.
"""


class Track(Hook):
    """A hook that passes the records of a run to a tracker.

    Args:
      key: the key under which the run directory stores the id that the tracker gave to the run. A
        resumed run passes this id to the tracker, so that the tracker appends to the same records.
    """

    def __init__(self, tracker: Tracker, key: str) -> None:
        self.tracker, self.key = tracker, key
        self._started, self._warned, self._failures = False, False, 0

    def start(self, run: Run) -> None:
        """Start the tracker when a run begins."""
        directory = run.directory
        kept = _read(directory / KEPT)
        tracked = Tracked(
            run.id,
            directory.name,
            directory,
            run.experiment.config.model_dump(mode="json"),
            _read(directory / VERSIONS),
            kept.get(self.key),
        )
        found = self._tried(run, lambda: self.tracker.start(tracked))
        self._started = found is not None
        if found is not None and kept.get(self.key) != found:
            values = {**kept, self.key: found}
            replace_text(directory / KEPT, json.dumps(values, indent=2) + "\n")

    def record(self, run: Run, step: int, split: str, values: Mapping[str, float]) -> None:
        """Pass a step's record to the tracker, unless the tracker has failed too often."""
        if self._started and self._failures < GIVEN_UP:
            self._tried(run, lambda: self.tracker.record(step, split, values))

    def end(self, run: Run, outcome: Outcome) -> None:
        """End the tracker with the outcome of the run."""
        if not self._started:
            return
        status: Status = "finished"
        if outcome.error is not None:
            status = "failed"
        elif outcome.stopped_by is not None and not outcome.complete:
            status = "stopped"
        self._tried(run, lambda: self.tracker.end(summary_of(outcome), status))

    def _tried(self, run: Run, call: Callable[[], Any]) -> Any:
        try:
            found = call()
        except Exception as error:
            self._failures += 1
            if not self._warned:
                self._warned = True
                run.say(
                    f"warning: tracker {self.key} failed: {describe_exception(error)}. The run "
                    "continues, and its own metrics.jsonl has all records"
                )
            return None
        self._failures = 0
        return found


def summary_of(outcome: Outcome) -> dict[str, float]:
    """Return the last metrics, and the seconds that each activity took, by `split/name`.

    >>> summary_of(Outcome(9, metrics={"loss": 1.5}, goodput={"goodput": 0.5}))
    {'step': 9, 'train/loss': 1.5, 'goodput/goodput': 0.5}
    """
    found: dict[str, float] = {"step": outcome.step}
    found |= {f"train/{name}": value for name, value in outcome.metrics.items()}
    found |= {f"heldout/{name}": value for name, value in outcome.heldout.items()}
    numbers = ("goodput", "wall_seconds", "lost_steps")
    found |= {f"goodput/{n}": outcome.goodput[n] for n in numbers if n in outcome.goodput}
    spent = outcome.goodput.get("seconds", {})
    return found | {f"goodput/{kind}_seconds": seconds for kind, seconds in spent.items()}


def _read(path: Path) -> JsonObject:
    """Return the object in a JSON file, or {} if the file is missing or damaged."""
    with suppress(OSError, ValueError):
        found: Any = read_json(path)
        if isinstance(found, dict):
            return found
    return {}
