"""Fences, which keep an earlier generation from writing into a run.

A fence consists of marks in the run's directory:

    RUN/generations/00000003     generation 3 has started to write

Each generation leaves a mark before it reads a file of the run. A generation that finds the mark of
a later generation stops writing. Marks are only added, so a late mark cannot lower the fence. A
process may be suspended between the check and the write. Therefore file names contain the
generation's number. The next generation first deletes the files of earlier generations
(`jaxdist.checkpoint.layout`) and replaces the file of metrics.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from jaxdist.errors import RunError, os_errors_as

FOLDER = "generations"


@dataclass(frozen=True)
class Fence:
    """The state of a fence, which refuses the writes of all generations before the newest.

    >>> fence = Fence().admit(3)
    >>> fence.admit(2) is None, fence.admit(4)
    (True, Fence(token=4))
    """

    token: int = 0

    def admit(self, token: int) -> Fence | None:
        """Return the fence after a write of generation `token`, or None if the write is refused."""
        return None if token < self.token else Fence(token)


class RunFence:
    """The fence of a run, as one generation sees it.

    Args:
      run: the run directory.
      generation: the number of this generation, which is larger than the numbers of all earlier
        generations.
    """

    def __init__(self, run: Path, generation: int) -> None:
        self.run, self.generation = run, generation

    def raise_(self) -> None:
        """Write this generation's mark; earlier generations stop writing when they see the mark.

        Raises:
          RunError: a later generation has started already, or the mark cannot be made.
        """
        with os_errors_as(
            RunError,
            f"run directory {self.run} cannot be written",
            "choose another directory with run.directory=PATH",
        ):
            folder = self.run / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self.generation:08d}").touch()
        # If two generations start at the same time, the older generation sees the mark of the newer
        # generation, because each generation checks only after it has left its mark.
        self.check()

    def check(self) -> None:
        """Check that this generation may write.

        Raises:
          RunError: a later generation has started.
        """
        newest = newest_generation(self.run)
        if Fence(newest).admit(self.generation) is None:
            raise RunError(
                f"generation {self.generation} of {self.run} was replaced by generation {newest}: "
                f"this process stops writing, and the run continues in generation {newest}"
            )


def newest_generation(run: Path) -> int:
    """Return the number of the newest generation with a mark in a run, or 0 if there is no mark."""
    try:
        names = os.listdir(run / FOLDER)
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return max((int(name) for name in names if name.isdigit()), default=0)


def newest_of_all(base: Path) -> int:
    """Return the newest generation with a mark in any of `base`, `base-2`, `base-3`, ..."""
    found = [base, *base.parent.glob(f"{base.name}-[0-9]*")]
    return max(newest_generation(run) for run in found)
