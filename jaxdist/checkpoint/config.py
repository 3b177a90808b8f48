"""The section `checkpoint` of a configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from jaxdist.checkpoint.parts import BeginWith, Patterns
from jaxdist.checkpoint.pieces import CHUNK_BYTES
from jaxdist.config.schema import Config, Count, FilePath

Auto = Literal["auto"]


class LocalConfig(Config):
    """Snapshots on a disk of each machine: quicker than a shared one, and left when it restarts."""

    directory: FilePath
    """Of every machine by itself; each run has a folder in it."""
    every: Count = 100
    """Steps between two of them."""


class CheckpointConfig(Config):
    """When to save, and what to keep."""

    every: Count | Auto = 500
    """Steps between two checkpoints; auto: by what a save costs, and how often the run fails."""
    memory_every: Count | Auto | None = 10
    """Steps between two snapshots in memory, which `jaxdist train --elastic` keeps for those who
    come after a lost process; auto as for checkpoints; null: none."""
    local: LocalConfig | None = None
    """Snapshots on each machine's own disk, between those in memory and checkpoints; null: none."""
    mttf_hours: PositiveFloat = 24.0
    """For auto: between two failures, until one was seen. A guess."""
    keep: Count = 3
    """How many of the newest checkpoints stay; 2 or more leave one to fall back on."""
    keep_best: bool = True
    """Whether the checkpoint with the best evaluation stays as well."""
    chunk_bytes: Count = CHUNK_BYTES
    """Size of the files of large arrays; one that did not change is not written again."""
    parts: Patterns | None = None
    """Paths of what checkpoints hold, such as params or !opt_state; null is all, for --resume."""
    begin_with: BeginWith | None = None
    """A part of another run's state to begin with, for fine-tuning; null is none."""
