"""The contract of a tracker. A new tracker is a file in this folder and a name in `config.py`."""

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
      id: id of the run, which stays the same when the run resumes.
      name: name of the run directory.
      config: the whole config, resolved.
      versions: versions of Python and of the packages that determine a run's numbers.
      kept: the key that `start` returned when this run was first tracked, or None at first.
    """

    id: str
    name: str
    directory: Path
    config: JsonObject
    versions: JsonObject = field(default_factory=dict)
    kept: str | None = None

    @property
    def unique_name(self) -> str:
        """The name with the beginning of the id, since other runs may have the same name."""
        return f"{self.name}-{self.id[:8]}"


class Tracker(Protocol):
    """A receiver of a run's numbers; its errors are reported once, and do not end the run.

    Process 0 calls a tracker from the thread that trains.
    """

    def start(self, run: Tracked) -> str:
        """Begin to track a run, or continue to track it; return the key of the tracked run.

        The key is stored in the run directory and passed again as `Tracked.kept`.
        """
        ...

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Receive a record of `metrics.jsonl`; after a resume, records of some steps come again."""
        ...

    def end(self, summary: Mapping[str, float], status: Status) -> None:
        """Send everything that remains, and end; called only if `start` has returned.

        Args:
          summary: the last metrics by `split/name`, and the time of the run by kind.
        """
        ...


def with_split(split: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return the values under names that include their split.

    >>> with_split("train", {"loss": 1.5})
    {'train/loss': 1.5}
    """
    return {f"{split}/{name}": float(value) for name, value in values.items()}
