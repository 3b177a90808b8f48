"""What goes wrong in front of a user: one base class, one message each, no traceback.

Everything a user can cause is a `JaxdistError` (a `ValueError`), so that the command line can print
the message and exit with `exit_code`. Everything else is a bug of ours and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

STOPPED = 75
"""Exit code of a run that was told to stop before its last step, and has saved: --resume goes on.
EX_TEMPFAIL of sysexits.h, so that a scheduler tells it from one that is done."""


class JaxdistError(ValueError):
    """A mistake that the user can mend; the message says what, where, the values, what to do."""

    exit_code = 2


class ConfigError(JaxdistError):
    """One or more problems of a configuration, all reported at once.

    Attributes:
      setting: path of the one to blame, from the section that is built; empty is the section.
    """

    def __init__(self, message: str, *, setting: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.setting = setting


@contextmanager
def blamed(*path: str) -> Iterator[None]:
    """What is wrong inside is reported as a setting below this path.

    >>> with blamed("strategy"):
    ...     raise ConfigError("no", setting=("workers",))
    Traceback (most recent call last):
    jaxdist.errors.ConfigError: no
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(str(error), setting=(*path, *error.setting)) from error


class MeshError(JaxdistError):
    """A mesh that cannot be built from the devices at hand."""


class ShardingError(JaxdistError):
    """A tensor, rule or dim that cannot be laid out on the mesh."""


class CollectiveError(JaxdistError):
    """A collective that means nothing here: its axis, dtype, shape or device."""


class CompressionError(JaxdistError):
    """An array, codec or feedback that do not go together."""


class LedgerError(JaxdistError):
    """A program that the ledger cannot read, or a mesh that is not the program's."""


class DataError(JaxdistError):
    """Missing, empty or malformed training data."""


class CheckpointError(JaxdistError):
    """A checkpoint that cannot be written, found, trusted or fitted."""

    exit_code = 3


class RunError(JaxdistError):
    """A run that cannot start or go on: directory, processes, numbers."""

    exit_code = 3


class StoppedError(RunError):
    """A run that was told to stop and did not get to a new checkpoint: the newest one stands."""

    exit_code = STOPPED


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that looks most like `word`, or None when nothing comes near.

    >>> closest("tensr", ["data", "tensor", "stage"])
    'tensor'
    """
    found = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A hint to end a message with: the closest match, else the whole list.

    >>> did_you_mean("tensr", ["data", "tensor"])
    "did you mean 'tensor'? (allowed: data, tensor)"
    >>> did_you_mean("xyz", ["data", "tensor"])
    'allowed: data, tensor'
    """
    options = list(choices)
    allowed = f"allowed: {', '.join(options)}"
    match = closest(word, options)
    return f"did you mean {match!r}? ({allowed})" if match else allowed
