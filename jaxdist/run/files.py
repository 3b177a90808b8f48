"""The files of a run, as one of its processes begins them and writes to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.config import read, resolved_yaml
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig
from jaxdist.metrics.writer import MetricsWriter, Tell, append
from jaxdist.run.agent_link import NoAgent
from jaxdist.run.directory import RunDirectory, prepare
from jaxdist.run.report.changes import changes

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunFiles:
    """The directory of a run that has begun, or is about to.

    Attributes:
      config: the run's own, which is written there.
      agent: knows whether this process may still write.
      say: prints a line, as it is.
    """

    directory: RunDirectory
    config: ExperimentConfig
    agent: NoAgent
    say: Say

    def begin(self) -> None:
        """Begin a new directory; of one that is resumed only say what differs from its config."""
        resolved = resolved_yaml(self.config)
        if self.directory.occupied:
            try:
                lines = changes(read(self.directory.config).values, resolved)
            except ConfigError as error:
                # The state is whole without it, and the config of this command replaces it.
                lines = [f"unknown, for {self.directory.config} is damaged: {error}"]
            for line in lines:
                self.say(f"changed since this run began: {line}")
        elif jax.process_index() == 0:
            prepare(self.directory, resolved)

    def metrics(self, resume_step: int | None, tell: Tell | None) -> MetricsWriter:
        """Open the file of metrics; for process 0 alone.

        Args:
          resume_step, tell: see `MetricsWriter`.
        """
        # Not earlier: a resume that is refused leaves the run's own config as it was.
        prepare(self.directory, resolved_yaml(self.config))
        given = {"resume_step": resume_step, "admit": self.agent.admit}
        return MetricsWriter(self.directory.path, tell=tell, **given)

    def append(self, step: int, values: dict[str, float], *, split: str) -> None:
        """Write one more record of metrics where the file is closed.

        Raises:
          RunError: a later generation has begun, or the disk refuses it.
        """
        self.agent.admit()
        append(self.directory.path, step, values, split=split)

    def store(self, on_event: Say) -> CheckpointStore:
        """Open the checkpoints.

        Args:
          on_event: told what is passed over, or cannot be removed.
        """
        config = self.config.checkpoint
        return CheckpointStore(
            self.directory.checkpoints,
            keep=config.keep,
            keep_best=config.keep_best,
            chunk_bytes=config.chunk_bytes,
            on_event=on_event,
            fence=self.agent.fence,
        )
