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
    """The directory, on a local disk of each machine, in which each run has a folder."""
    every: Count = 100
    """The number of steps between two snapshots."""


class CheckpointConfig(Config):
    """The settings of checkpoints and snapshots: their frequency, content and retention."""

    every: Count | Auto = 500
    """The number of steps between two checkpoints. auto derives the number from the cost of a save
    and the rate of failures."""
    memory_every: Count | Auto | None = 10
    """The number of steps between two snapshots in memory, from which `jaxdist train --elastic`
    resumes after the loss of a process. auto derives the number as for checkpoints, and null takes
    no snapshots."""
    local: LocalConfig | None = None
    """The snapshots on each machine's own disk, which are less frequent than snapshots in memory
    and more frequent than checkpoints; null takes no such snapshots."""
    mttf_hours: PositiveFloat = 24.0
    """The mean time between failures, in hours, that `every: auto` and `memory_every: auto` assume
    until the first failure. Set a smaller value on machines that fail or are preempted often."""
    keep: Count = 3
    """The number of newest checkpoints to keep. With 2 or more, a resume can skip a damaged
    checkpoint and use the checkpoint before it."""
    keep_best: bool = True
    """Whether to keep, in addition to the newest checkpoints, the checkpoint with the best
    evaluation."""
    chunk_bytes: Count = CHUNK_BYTES
    """The largest size of the files into which large arrays are divided, in bytes. A file whose
    content has not changed since the last checkpoint is not written again."""
    parts: Patterns | None = None
    """The patterns of the paths to save, such as params or !opt_state, to make checkpoints smaller.
    null saves the whole state, which --resume needs."""
    begin_with: BeginWith | None = None
    """The part of another run's state with which this run begins, for fine-tuning; null initializes
    the whole state.
    """
