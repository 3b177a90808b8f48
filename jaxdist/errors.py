"""The errors that a user sees: a common base class, a message each, and no traceback.

Everything that a user can cause is a `JaxdistError` (a `ValueError`), so that the command line can
print the message and exit with `exit_code`. Everything else is a bug, and shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

STOPPED = 75
"""Exit code of a run that was stopped before its last step and has saved; --resume continues it. It
is EX_TEMPFAIL of sysexits.h, so that a scheduler can distinguish it from success."""


class JaxdistError(ValueError):
    """A mistake that the user can fix; the message says what is wrong, where, and what to do."""

    exit_code = 2


class ConfigError(JaxdistError):
    """Problems of a configuration, all reported at once.

    Attributes:
      setting: path of the setting at fault, relative to the section that is built; an empty path
        is the section itself.
      more: further errors, found at the same time at other settings.
    """

    def __init__(
        self, message: str, *, setting: tuple[str, ...] = (), more: Iterable[ConfigError] = ()
    ) -> None:
        super().__init__(message)
        self.setting, self.more = setting, tuple(more)

    def below(self, *path: str) -> ConfigError:
        """Return the same error, with all its settings below a path."""
        more = [one.below(*path) for one in self.more]
        return ConfigError(str(self), setting=(*path, *self.setting), more=more)


@contextmanager
def blamed(*path: str) -> Iterator[None]:
    """Report errors inside the block at a setting below this path.

    >>> with blamed("strategy"):
    ...     raise ConfigError("no", setting=("workers",))
    Traceback (most recent call last):
    jaxdist.errors.ConfigError: no
    """
    try:
        yield
    except ConfigError as error:
        raise error.below(*path) from error


class MeshError(JaxdistError):
    """A mesh that cannot be built from the available devices."""


class ShardingError(JaxdistError):
    """A tensor, rule or dim that cannot be laid out on the mesh."""


class CollectiveError(JaxdistError):
    """An invalid collective: its axis, dtype, shape or device does not fit."""


class CompressionError(JaxdistError):
    """An array, codec and feedback that do not fit together."""


class LedgerError(JaxdistError):
    """A program that the ledger cannot read, or a mesh that is not the program's."""


class DataError(JaxdistError):
    """Missing, empty or malformed training data."""


class CheckpointError(JaxdistError):
    """A checkpoint that cannot be written, found, verified or loaded."""

    exit_code = 3


class RunError(JaxdistError):
    """A run that cannot start or continue, because of its directory, processes or numbers."""

    exit_code = 3


class StoppedError(RunError):
    """A run that was stopped without a new checkpoint: the previous checkpoint is the newest."""

    exit_code = STOPPED


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice most similar to `word`, or None when nothing is close.

    The initials of a choice count as close, since many users write `lr` for `learning_rate`.

    >>> closest("tensr", ["data", "tensor", "stage"])
    'tensor'
    >>> closest("lr", ["clip_norm", "learning_rate"])
    'learning_rate'
    """
    options = list(choices)
    found = difflib.get_close_matches(str(word), options, n=1, cutoff=0.6)
    initials = ("".join(part[:1] for part in option.split("_")) for option in options)
    shortened = [one for one, short in zip(options, initials, strict=True) if short == word]
    return next(iter(found or shortened), None)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return a hint to end a message with: the closest match, else the whole list.

    >>> did_you_mean("tensr", ["data", "tensor"])
    "did you mean 'tensor'? (allowed: data, tensor)"
    >>> did_you_mean("xyz", ["data", "tensor"])
    'allowed: data, tensor'
    """
    options = list(choices)
    allowed = f"allowed: {', '.join(options)}"
    match = closest(word, options)
    return f"did you mean {match!r}? ({allowed})" if match else allowed
