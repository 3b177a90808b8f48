"""A tracker for MLflow (https://mlflow.org): a tracking server, or a database file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxdist.config.document import flat
from jaxdist.metrics.trackers.contract import Status, Tracked, with_split

MOST_PARAMS = 100
"""The largest number of parameters that a server accepts in a request."""
LONGEST_VALUE = 500
_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


@dataclass
class MlflowTracker:
    """A tracker that sends records to a run of MLflow; `project` is MLflow's experiment.

    The tracker makes a new client, so that `mlflow.active_run()` does not change.
    """

    project: str
    name: str | None
    uri: str | None

    def start(self, run: Tracked) -> str:
        """Begin or continue to track a run, and return the key of MLflow's run."""
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        self._client: Any = MlflowClient(self.uri)
        self._step = 0
        if run.kept is not None:
            self._id = run.kept
            self._client.update_run(self._id, status="RUNNING")
            return self._id
        found = self._client.get_experiment_by_name(self.project)
        group = found.experiment_id if found else self._client.create_experiment(self.project)
        tags = {"jaxdist.id": run.id, "jaxdist.directory": str(run.directory)}
        tags |= {f"version.{name}": str(value) for name, value in run.versions.items()}
        name = self.name or run.name
        self._id = self._client.create_run(group, run_name=name, tags=tags).info.run_id
        self._params(run)
        return self._id

    def _params(self, run: Tracked) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        params = [
            Param(name, str(value)[:LONGEST_VALUE]) for name, value in flat(run.config).items()
        ]
        for at in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._id, params=params[at : at + MOST_PARAMS])

    def record(self, step: int, split: str, values: Mapping[str, float]) -> None:
        """Send a record to MLflow."""
        self._log(step, with_split(split, values))

    def _log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._step = step
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, summary: Mapping[str, float], status: Status) -> None:
        """Send the summary to MLflow, and end the run there."""
        self._log(self._step, {f"final/{name}": value for name, value in summary.items()})
        self._client.set_terminated(self._id, _STATUS[status])
