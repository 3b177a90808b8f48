"""The start time of this process, which is before any of its Python ran."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/self/stat")
_START_TICKS = 19
"""Index of the start time (field 22 of proc_pid_stat(5)) after the command's name, field 2."""


def begun(stat: Path = _STAT) -> int:
    """Return the value that `time.perf_counter_ns` had when this process started.

    It is accurate to a hundredth of a second, as on Linux; a process that replaced itself (exec)
    counts as the same process. Where the system does not provide it, the result is the time now.
    """
    now = time.perf_counter_ns()
    try:
        # The name is in brackets and may contain anything, including brackets.
        ticks = int(stat.read_text().rpartition(")")[2].split()[_START_TICKS])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        age_seconds = since_boot - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(round(1e9 * age_seconds), 0)
