"""The time at which the operating system started this process, before any Python code ran."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/self/stat")
_START_TICKS = 19
"""The index of the start time (field 22 of proc_pid_stat(5)) in the fields after the command's
name, which is field 2."""


def begun(stat: Path = _STAT) -> int:
    """Return the value that `time.perf_counter_ns` had when this process started.

    The value is accurate to a hundredth of a second, the resolution on Linux. A process that has
    replaced itself (exec) counts as the same process. On a system that does not provide the start
    time, the result is the current time.
    """
    now = time.perf_counter_ns()
    try:
        # The command's name is in brackets and may contain spaces and brackets.
        ticks = int(stat.read_text().rpartition(")")[2].split()[_START_TICKS])
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        age_seconds = since_boot - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - max(round(1e9 * age_seconds), 0)
