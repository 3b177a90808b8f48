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
      kept: the result of `start` when this run was tracked before; None for the first time.
    """

    id: str
    name: str
    directory: Path
    config: JsonObject
    versions: JsonObject = field(default_factory=dict)
    kept: str | None = None

    @property
    def unique_name(self) -> str:
        """The name with the beginning of the id: other runs may have directories of this name."""
        return f"{self.name}-{self.id[:8]}"


class Tracker(Protocol):
    """A receiver of a run's numbers; its errors are reported once, and do not end the run.

    Process 0 calls it, from the thread that trains.
    """

    def start(self, run: Tracked) -> str:
        """Begin to track a run, or continue; return the key of the tracked run.

        The key is stored in the run directory and passed again as `Tracked.kept`.
        """
        ...

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Receive a record of `metrics.jsonl`; after a resume those of some steps are repeated."""
        ...

    def end(self, summary: Mapping[str, float], status: Status) -> None:
        """Send everything that remains, and end; called only after a `start` that has returned.

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
