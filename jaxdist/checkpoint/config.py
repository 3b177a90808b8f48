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
    """Directory on every machine's own disk; each run has a folder in it."""
    every: Count = 100
    """Steps between two snapshots."""


class CheckpointConfig(Config):
    """When to save, and what to keep."""

    every: Count | Auto = 500
    """Steps between two checkpoints; auto: from the cost of a save and the rate of failures."""
    memory_every: Count | Auto | None = 10
    """Steps between two snapshots in memory, from which `jaxdist train --elastic` resumes after a
    lost process; auto as for checkpoints; null takes none."""
    local: LocalConfig | None = None
    """Snapshots on each machine's own disk, between those in memory and checkpoints; null takes
    none."""
    mttf_hours: PositiveFloat = 24.0
    """Mean hours between failures, which auto assumes until it has seen a failure."""
    keep: Count = 3
    """Number of newest checkpoints to keep; with 2 or more, an older one can replace a damaged
    one."""
    keep_best: bool = True
    """Whether to keep the checkpoint with the best evaluation as well."""
    chunk_bytes: Count = CHUNK_BYTES
    """Size of the files of large arrays; a file whose content is unchanged is not written again."""
    parts: Patterns | None = None
    """Paths to save, such as params or !opt_state; null saves everything, which --resume needs."""
    begin_with: BeginWith | None = None
    """Part of another run's state to start from, for fine-tuning; null starts afresh."""
