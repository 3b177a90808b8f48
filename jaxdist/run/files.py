"""The files of a run, with functions that create the files and write to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from jaxdist.checkpoint.store import CheckpointStore
from jaxdist.config import read, resolved_yaml
from jaxdist.errors import ConfigError
from jaxdist.experiment import ExperimentConfig
from jaxdist.metrics.writer import MetricsWriter, Tell, append
from jaxdist.run.agent_link import AgentLink
from jaxdist.run.directory import RunDirectory, prepare_directory
from jaxdist.run.report.changes import changes

Say = Callable[[str], None]


@dataclass(frozen=True)
class RunFiles:
    """The files of a run that has begun, or is about to begin.

    Attributes:
      config: the run's config, which is written to the run directory.
      agent: the link to the agent, which decides whether this process may still write.
      say: the function that prints a line without markup.
    """

    directory: RunDirectory
    config: ExperimentConfig
    agent: AgentLink
    say: Say

    def begin(self) -> None:
        """Create the directory of a new run, or print how a resumed run's config has changed."""
        resolved = resolved_yaml(self.config)
        if self.directory.occupied:
            try:
                lines = changes(read(self.directory.config).values, resolved)
            except ConfigError as error:
                # The run continues, because its saved state does not depend on the old config. The
                # config file is replaced later.
                lines = [
                    f"the changes are unknown, because {self.directory.config} is damaged: {error}"
                ]
            for line in lines:
                self.say(f"changed since this run began: {line}")
        elif jax.process_index() == 0:
            prepare_directory(self.directory, resolved)

    def metrics(self, resume_step: int | None, tell: Tell) -> MetricsWriter:
        """Open the file of metrics for writing; only process 0 calls this method.

        Args:
          resume_step, tell: see `MetricsWriter`.
        """
        # The config is replaced only now, because a resume that fails earlier must leave the old
        # config in the directory.
        prepare_directory(self.directory, resolved_yaml(self.config))
        given = {"resume_step": resume_step, "admit": self.agent.admit}
        return MetricsWriter(self.directory.path, tell=tell, **given)

    def append(self, step: int, values: dict[str, float], *, split: str) -> None:
        """Append a record of metrics after the writer of metrics was closed.

        Raises:
          RunError: a later generation has started, or the record cannot be written.
        """
        self.agent.admit()
        append(self.directory.path, step, values, split=split)

    def store(self, on_event: Say) -> CheckpointStore:
        """Open the store of the run's checkpoints.

        Args:
          on_event: the function that is called with a line about each file that is skipped or
            cannot be removed.
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
