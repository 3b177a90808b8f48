"""The errors that a user can cause, with a common base class.

For a `JaxdistError` (a `ValueError`) the command line prints the message without a traceback, and
exits with `exit_code`. Every other exception is a bug, and its traceback is printed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

STOPPED = 75
"""The exit code of a run that was stopped before its last step and has saved a checkpoint; --resume
continues the run. The code is EX_TEMPFAIL of sysexits.h, so that a scheduler can distinguish it
from success."""


class JaxdistError(ValueError):
    """The base class of errors that the user can fix.

    The message says what is wrong, where it is, and what to do.

    Attributes:
      exit_code: the exit code of a command that ends with this error.
    """

    exit_code = 2


class ConfigError(JaxdistError):
    """The error for an invalid configuration, which may have several problems.

    Attributes:
      setting: the path of the setting at fault, relative to the section of the config that is
        built. An empty path means the section itself.
      more: the errors for the problems of all other settings.
    """

    def __init__(
        self, message: str, *, setting: tuple[str, ...] = (), more: Iterable[ConfigError] = ()
    ) -> None:
        super().__init__(message)
        self.setting, self.more = setting, tuple(more)

    def below(self, *path: str) -> ConfigError:
        """Return a copy of the error in which `path` is prepended to the path of each setting."""
        more = [one.below(*path) for one in self.more]
        return ConfigError(str(self), setting=(*path, *self.setting), more=more)


@contextmanager
def blamed(*path: str) -> Iterator[None]:
    """Return a context manager that prepends `path` to the settings of a ConfigError.

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
    """The error for a mesh that cannot be built from the available devices."""


class ShardingError(JaxdistError):
    """The error for a tensor, a dim or a rule of sharding that does not fit the mesh."""


class CollectiveError(JaxdistError):
    """The error for a collective with an invalid axis, dtype, shape or device."""


class CompressionError(JaxdistError):
    """The error for an array, codec and error feedback that do not fit together."""


class LedgerError(JaxdistError):
    """The error for a program that the ledger cannot read, or that runs on another mesh."""


class DataError(JaxdistError):
    """The error for training data that are missing, empty or malformed."""


class CheckpointError(JaxdistError):
    """The error for a checkpoint that cannot be written, found, verified or loaded."""

    exit_code = 3


class RunError(JaxdistError):
    """The error for a run whose directory, processes or numbers prevent it from continuing."""

    exit_code = 3


class StoppedError(RunError):
    """The error for a run that stopped without a new checkpoint."""

    exit_code = STOPPED


@contextmanager
def os_errors_as(
    kind: type[JaxdistError],
    failed: str,
    remedy: str = "",
    *,
    also: tuple[type[Exception], ...] = (),
) -> Iterator[None]:
    """Return a context manager that raises each OSError as an error that the user can fix.

    Args:
      kind: the class of the raised error.
      failed: the clause that says what cannot be done; the reason of the system follows it.
      remedy: the clause that says what to do, or an empty string.
      also: the classes of other errors that are raised in the same way, such as the errors of a
        parser.

    >>> with os_errors_as(RunError, "the page cannot be written", "free some space"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    jaxdist.errors.RunError: the page cannot be written: No space left on device; free some space
    """
    try:
        yield
    except (OSError, *also) as error:
        text = f"{failed}: {getattr(error, 'strerror', None) or error}"
        raise kind(f"{text}; {remedy}" if remedy else text) from error


def closest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is most similar to `word`, or None if no choice is similar.

    `word` may also be the initials of a choice, since many users write `lr` for `learning_rate`.

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
    """Return a hint for the end of an error message: the most similar choice, and all choices.

    >>> did_you_mean("tensr", ["data", "tensor"])
    "did you mean 'tensor'? (allowed: data, tensor)"
    >>> did_you_mean("xyz", ["data", "tensor"])
    'allowed: data, tensor'
    """
    options = list(choices)
    allowed = f"allowed: {', '.join(options)}"
    match = closest(word, options)
    return f"did you mean {match!r}? ({allowed})" if match else allowed


LINES = "\n  "
"""The text between the indented lines of a list."""


def some_of(names: Sequence[str], most: int, joint: str = ", ") -> str:
    """Join at most `most` names, and count the others.

    >>> some_of(["a", "b", "c"], 2), some_of(["a", "b"], 2), some_of(["a", "b"], 1, "; ")
    ('a, b and 1 more', 'a, b', 'a; and 1 more')
    """
    shown, rest = joint.join(names[:most]), len(names) - most
    return f"{shown}{' ' if joint == ', ' else joint}and {rest} more" if rest > 0 else shown


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type for an error without a message.

    >>> first_line(ValueError("too large\\nat line 3")), first_line(ValueError())
    ('too large', 'ValueError')
    """
    return next(iter(str(error).splitlines()), type(error).__name__)
