"""The contract of a tracker; each tracker has a file in this folder and a name in `config.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from jaxdist.types import JsonObject

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Tracked:
    """The facts about a run that its tracker receives.

    Attributes:
      id: the id of the run, which stays the same when the run resumes.
      name: the name of the run directory.
      config: the complete config, resolved.
      versions: the versions of Python and of the packages that determine a run's numbers.
      kept: the key that `start` returned for an earlier attempt of the run, or None without a key.
    """

    id: str
    name: str
    directory: Path
    config: JsonObject
    versions: JsonObject = field(default_factory=dict)
    kept: str | None = None

    @property
    def unique_name(self) -> str:
        """The run's name followed by the beginning of its id, since names may not be unique."""
        return f"{self.name}-{self.id[:8]}"


class Tracker(Protocol):
    """A receiver of a run's numbers; its errors are printed and do not end the run.

    Process 0 calls a tracker from the thread that trains.
    """

    def start(self, run: Tracked) -> str:
        """Begin to track a run, or continue to track it, and return a key.

        The key identifies the tracked run. The run directory stores the key, and a resumed run
        passes the key as `Tracked.kept`.
        """
        ...

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Receive a record of `metrics.jsonl`; a resumed run repeats the records of some steps."""
        ...

    def end(self, summary: Mapping[str, float], status: Status) -> None:
        """Send the remaining records, and end the tracked run, for which `start` returned a key.

        Args:
          summary: the last metrics by `split/name`, and the time of the run by activity.
          status: whether the run finished, failed or was stopped.
        """
        ...


def with_split(split: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a record by `split/name`, instead of by name.

    >>> with_split("train", {"loss": 1.5})
    {'train/loss': 1.5}
    """
    return {f"{split}/{name}": float(value) for name, value in values.items()}
