"""The section `checkpoint` of a configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from jaxdist.checkpoint.parts import BeginWith, Patterns
from jaxdist.checkpoint.pieces import CHUNK_BYTES
from jaxdist.config.schema import Config, Count, FilePath

Auto = Literal["auto"]


class LocalConfig(Config):
    """Snapshots on each machine's own disk, which is faster than shared storage."""

    directory: FilePath
    """Directory on every machine's own disk, in which each run has a folder."""
    every: Count = 100
    """Number of steps between two snapshots."""


class CheckpointConfig(Config):
    """The settings of checkpoints and snapshots: their frequency, their content and retention."""

    every: Count | Auto = 500
    """Number of steps between two checkpoints; auto derives it from the cost of a save and the rate
    of failures."""
    memory_every: Count | Auto | None = 10
    """Number of steps between two snapshots in memory, from which `jaxdist train --elastic` resumes
    after the loss of a process; auto derives it as for checkpoints; null takes no snapshots."""
    local: LocalConfig | None = None
    """Snapshots on each machine's own disk, less frequent than snapshots in memory and more
    frequent than checkpoints; null takes no such snapshots."""
    mttf_hours: PositiveFloat = 24.0
    """Mean time between failures in hours, which auto assumes until the run has had a failure."""
    keep: Count = 3
    """Number of newest checkpoints to keep; with 2 or more, a resume can skip a damaged
    checkpoint."""
    keep_best: bool = True
    """Whether to keep the checkpoint with the best evaluation as well."""
    chunk_bytes: Count = CHUNK_BYTES
    """Size of the files of large arrays; a file whose content is unchanged is not written again."""
    parts: Patterns | None = None
    """Patterns of the paths to save, such as params or !opt_state; null saves everything, which
    --resume needs."""
    begin_with: BeginWith | None = None
    """Part of another run's state to start from, for fine-tuning; null starts afresh."""
