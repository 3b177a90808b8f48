"""Weights & Biases, https://docs.wandb.ai: online, or in files that `wandb sync` sends later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxdist.metrics.trackers.contract import Status, Tracked, with_split

Mode = Literal["online", "offline", "disabled"]


@dataclass
class WandbTracker:
    """A tracker that sends records to a run of Weights & Biases, with files in the run directory.

    `step` is a metric and the axis of all other metrics: after a resume some steps are repeated,
    and the package's own counter of steps only increases.
    """

    project: str
    name: str | None
    entity: str | None
    mode: Mode | None
    tags: tuple[str, ...]

    def start(self, run: Tracked) -> str:
        """Begin to track a run, or continue to track it."""
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
            # The user's own run stays open, and `wandb.run` does not change.
            reinit="create_new",
            settings=wandb.Settings(**quiet),
        )
        self._run.define_metric("*", step_metric="step")
        return self._run.id

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Send a record."""
        self._run.log({"step": step, **with_split(split, values)})

    def end(self, summary: Mapping[str, float], status: Status) -> None:
        """Send the summary, and end."""
        self._run.summary.update({**summary, "status": status})
        self._run.finish(exit_code=int(status == "failed"))
