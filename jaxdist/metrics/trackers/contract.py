"""The contract of a tracker. A new one is a file beside this one and a name in `config.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from jaxdist.types import JsonObject

Status = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class Tracked:
    """What a tracker is told of the run that it tracks.

    Attributes:
      id: stays the same when the run goes on after an interruption.
      name: of the run directory.
      config: the whole config, resolved.
      versions: of Python and of the packages that decide a run's numbers.
      kept: what `start` returned when this run was tracked before; None for the first time.
    """

    id: str
    name: str
    directory: Path
    config: JsonObject
    versions: JsonObject = field(default_factory=dict)
    kept: str | None = None

    @property
    def unique_name(self) -> str:
        """The name with the beginning of the id: other runs have directories of this name, too."""
        return f"{self.name}-{self.id[:8]}"


class Tracker(Protocol):
    """Takes a run's numbers; what it raises is told once, and does not end the run.

    It is called by process 0, from the thread that trains.
    """

    def start(self, run: Tracked) -> str:
        """Begin to track a run, or go on; returns what finds the tracked run again.

        That is kept in the run directory and comes back as `Tracked.kept`.
        """
        ...

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Take a record of `metrics.jsonl`; after a resume those of some steps come again."""
        ...

    def end(self, summary: Mapping[str, float], status: Status) -> None:
        """End, and send what was not sent yet; called only after a `start` that has returned.

        Args:
          summary: the last metrics by `split/name`, and where the time of the run went.
        """
        ...


def named(split: str, values: Mapping[str, float]) -> dict[str, float]:
    """The values under names that say their split.

    >>> named("train", {"loss": 1.5})
    {'train/loss': 1.5}
    """
    return {f"{split}/{name}": float(value) for name, value in values.items()}
