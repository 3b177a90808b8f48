"""The run directory: what it holds, and which one a run takes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from jaxdist import environment
from jaxdist.errors import RunError

PACKAGES = (
    "python",
    "jaxdist",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "numpy",
)
"""What decides a run's numbers."""


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run: resolved config, versions, metrics, checkpoints, loss curve."""

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, which `jaxdist train` can run again."""
        return self.path / "config.yaml"

    @property
    def versions(self) -> Path:
        """Versions of Python and of the packages that matter."""
        return self.path / "versions.json"

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def curve(self) -> Path:
        """The loss curve."""
        return self.path / "loss.png"

    @property
    def occupied(self) -> bool:
        """Whether a run has begun here."""
        return self.config.exists()


def choose(base: Path, *, resume: bool) -> RunDirectory:
    """The directory that a run takes: `base`, or `base-2`, `base-3` ... when others stand there.

    With `resume`, the newest that has begun (`base` when none has), so that a relaunched job finds
    its own; without, the first that is free, so that nothing is ever overwritten.
    """
    candidates = [base]
    while RunDirectory(candidates[-1]).occupied:
        candidates.append(base.with_name(f"{base.name}-{len(candidates) + 1}"))
    newest = candidates[-2] if resume and len(candidates) > 1 else candidates[-1]
    return RunDirectory(newest)


def prepare(directory: RunDirectory, resolved_config: str) -> None:
    """Create the directory and write the resolved config and versions, atomically.

    Raises:
      RunError: it cannot be written.
    """
    try:
        directory.path.mkdir(parents=True, exist_ok=True)
        versions = environment.versions(PACKAGES)
        _write(directory.versions, json.dumps(versions, indent=2) + "\n")
        _write(directory.config, resolved_config)
    except OSError as error:
        raise RunError(
            f"run directory {directory.path} cannot be written: {error.strerror or error}; "
            "choose another with run.directory=PATH"
        ) from error


def _write(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
