"""A cache of compiled programs between runs, so that the second start of a run compiles nothing.

Programs that jax reads from the cache run as native code in this process. Therefore the directory
must belong to this user, and no other user may write to it.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SETTINGS: Mapping[str, Any] = {
    "jax_enable_compilation_cache": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
"""The settings of jax's cache that keep every compiled program, even a program that compiles fast,
since a run needs all of its programs at the start.
"""

_log = logging.getLogger(__name__)


@contextmanager
def enabled(directory: Path) -> Iterator[Path | None]:
    """Call `enable` for the `with` block, and restore the settings of jax's cache afterwards."""
    import jax
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    settings: Any = jax.config
    names = (*SETTINGS, "jax_compilation_cache_dir")
    before = {name: getattr(settings, name) for name in names}
    try:
        yield enable(directory)
    finally:
        if settings.jax_compilation_cache_dir != before["jax_compilation_cache_dir"]:
            for name, value in before.items():
                settings.update(name, value)
            # Without the reset, jax would keep using the cache directory that is open.
            reset_cache()


def enable(directory: Path) -> Path | None:
    """Let jax keep compiled programs in a private directory (mode 0700); return the directory.

    If the user has set up a cache for jax (JAX_COMPILATION_CACHE_DIR), the function changes nothing
    and returns the directory of that cache. If the user has switched the cache off
    (JAX_ENABLE_COMPILATION_CACHE), the function changes nothing and returns None. If the directory
    cannot be made or is not private to this user, a warning gives the reason, the result is None,
    and the run has no cache.
    """
    import jax

    settings: Any = jax.config
    if settings.jax_compilation_cache_dir is not None:
        return Path(settings.jax_compilation_cache_dir)
    if not settings.jax_enable_compilation_cache:
        return None
    reason = _take(directory)
    if reason is not None:
        _log.warning(
            "compiled programs are not cached: %s %s (JAX_COMPILATION_CACHE_DIR can "
            "name another folder)",
            directory,
            reason,
        )
        return None
    for name, value in SETTINGS.items():
        settings.update(name, value)
    settings.update("jax_compilation_cache_dir", str(directory))
    return directory


def _take(directory: Path) -> str | None:
    """Create a private directory; return why the directory cannot be used, or None if it can."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        # `stat` would follow a link, whose target could change later.
        found = directory.lstat()
    except OSError as error:
        return f"cannot be made: {error.strerror}"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory (a link, perhaps)"
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        return f"belongs to user {found.st_uid}, not to {os.getuid()}"
    if found.st_mode & 0o022:
        return (
            f"can be written by other users (mode {stat.S_IMODE(found.st_mode):o}): run chmod 700 "
            "on it"
        )
    if not os.access(directory, os.W_OK | os.X_OK):
        return "cannot be written"
    return None
