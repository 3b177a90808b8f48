"""A tracker for Weights & Biases (https://docs.wandb.ai), online or offline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxdist.metrics.trackers.contract import Status, Tracked, with_split

Mode = Literal["online", "offline", "disabled"]


@dataclass
class WandbTracker:
    """A tracker that sends records to a run of Weights & Biases, with files in the run directory.

    A resumed run repeats some steps, but the package's counter of steps only increases. Therefore
    `step` is sent as a metric, and all other metrics are plotted against it.
    """

    project: str
    name: str | None
    entity: str | None
    mode: Mode | None
    tags: tuple[str, ...]

    def start(self, run: Tracked) -> str:
        """Begin or continue to track a run, and return the key of the tracked run."""
        import wandb  # pyright: ignore[reportMissingImports]

        quiet = {"silent": True, "console": "off", "disable_git": True, "save_code": False}
        self._run: Any = wandb.init(
            project=self.project,
            entity=self.entity,
            name=self.name or run.name,
            id=run.kept or run.id,
            resume="allow",
            dir=run.directory,
            config={**run.config, "jaxdist": {"id": run.id, "versions": run.versions}},
            tags=list(self.tags) or None,
            mode=self.mode,
            # The new run is separate from a run that the user has begun, and `wandb.run` does not
            # change.
            reinit="create_new",
            settings=wandb.Settings(**quiet),
        )
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Send a record to Weights & Biases."""
        self._run.log({"step": step, **with_split(split, values)})

    def end(self, summary: Mapping[str, float], status: Status) -> None:
        """Send the summary to Weights & Biases, and end the run there."""
        self._run.summary.update({**summary, "status": status})
        self._run.finish(exit_code=int(status == "failed"))
