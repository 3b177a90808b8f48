"""A tracker for Trackio (https://huggingface.co/docs/trackio), on this machine or a Space."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxdist.metrics.trackers.contract import Status, Tracked, with_split


@dataclass
class TrackioTracker:
    """A tracker that sends records to a run of Trackio.

    A run that resumes continues the run of Trackio with the same name.
    """

    project: str
    name: str | None
    space: str | None

    def start(self, run: Tracked) -> str:
        """Begin or continue to track a run, and return the key of Trackio's run."""
        import trackio  # pyright: ignore[reportMissingImports]

        self._module: Any = trackio
        name = run.kept or self.name or run.unique_name
        self._run: Any = trackio.init(
            project=self.project,
            name=name,
            space_id=self.space,
            config={**run.config, "jaxdist": {"id": run.id, "versions": run.versions}},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._last = 0
        return name

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Send a record to Trackio."""
        self._last = step
        self._run.log(with_split(split, values), step=step)

    def end(self, summary: Mapping[str, float], status: Status) -> None:
        """Send the summary to Trackio, and end the run there."""
        final = {f"final/{name}": value for name, value in summary.items()}
        self._run.log({**final, "final/status": status}, step=self._last)
        # The run's `finish` is not called, since trackio would then finish the run again at exit.
        self._module.finish()
