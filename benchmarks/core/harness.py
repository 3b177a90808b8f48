"""A fair comparison of the times of a callable or command and of a reference.

Both run alternately, and their order changes from pair to pair, so that a machine that slows down
affects both. The ratio of the times is the median of the ratios of the pairs.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from jaxdist.errors import RunError

T = TypeVar("T")

WARMUP, REPEATS = 3, 9


@dataclass(frozen=True)
class Sample:
    """Measured seconds, in the order of measurement."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def __truediv__(self, other: Sample | float) -> Sample:
        """Divide each value by a number, or by the other sample's value of the same index.

        >>> Sample((4.0, 9.0)) / 2 / Sample((1.0, 3.0))
        Sample(seconds=(2.0, 1.5))
        """
        if isinstance(other, Sample):
            pairs = zip(self.seconds, other.seconds, strict=True)
            return Sample(tuple(a / b if b else math.nan for a, b in pairs))
        return Sample(tuple(value / other for value in self.seconds))

    @property
    def iqr(self) -> float:
        """The interquartile range in seconds, which is the spread of the middle half."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return high - low


def interleave(
    ours: Callable[[], object],
    reference: Callable[[], object],
    *,
    warmup: int = WARMUP,
    repeats: int = REPEATS,
) -> tuple[Sample, Sample]:
    """Time two callables alternately in this process; garbage is collected between calls only.

    Both must wait for their own result (`jax.block_until_ready`). Otherwise JAX returns before the
    work is done, and the time of the other callable includes the rest of the work.

    Args:
      ours, reference: the callables, each called `warmup + repeats` times.
      warmup: the number of pairs that run first and are not counted (compilation, caches).
      repeats: the number of pairs that are counted.

    Returns:
      The samples of `ours` and of `reference`; equal indices are a pair.
    """
    pairs: list[tuple[float, float]] = []
    with _no_collection():
        for index in range(warmup + repeats):
            times = _in_turn(index, lambda: _seconds(ours), lambda: _seconds(reference))
            pairs.append(times)
    return _samples(pairs[warmup:])


@dataclass(frozen=True)
class ProcessSample:
    """The seconds of whole processes: wall time, and CPU time (user and system)."""

    wall: Sample
    cpu: Sample


def alternate_processes(
    ours: Sequence[str],
    reference: Sequence[str],
    *,
    warmup: int = WARMUP,
    repeats: int = REPEATS,
    environ: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
) -> tuple[ProcessSample, ProcessSample]:
    """Time two commands alternately, each time in a new process.

    Args:
      ours, reference: the program and arguments of each command.
      warmup, repeats: as for `interleave`.
      environ: the environment of the processes, or None for the environment of this process.
      timeout_seconds: the limit for one process.

    Raises:
      RunError: a process fails or takes too long.
    """

    def measure(command: Sequence[str]) -> tuple[float, float]:
        return process_seconds(command, environ=environ, timeout_seconds=timeout_seconds)

    pairs = [
        _in_turn(index, lambda: measure(ours), lambda: measure(reference))
        for index in range(warmup + repeats)
    ][warmup:]
    walls = _samples([(a[0], b[0]) for a, b in pairs])
    cpus = _samples([(a[1], b[1]) for a, b in pairs])
    return ProcessSample(walls[0], cpus[0]), ProcessSample(walls[1], cpus[1])


def process_seconds(
    command: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
) -> tuple[float, float]:
    """Run a command, and return its wall and CPU seconds.

    Raises:
      RunError: the process fails or takes too long.
    """
    with tempfile.TemporaryFile() as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )
        timer = threading.Timer(timeout_seconds, process.kill)
        timer.start()
        # `Popen.wait` would reap the process without its CPU time.
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        in_time = timer.is_alive()
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        last = errors.read().decode(errors="replace").strip().rpartition("\n")[2]
    if process.returncode:
        cause = f"exit code {process.returncode}: {last}"
        if not in_time:
            cause = f"it took more than {timeout_seconds:g} s"
        raise RunError(f"`{' '.join(command)}` cannot be timed: {cause}; run it by hand")
    return wall, usage.ru_utime + usage.ru_stime


def paired_ratio(ours: Sample, reference: Sample) -> float:
    """Return the median of ours / reference over pairs, in which a common drift cancels out.

    >>> paired_ratio(Sample((2.0, 4.0, 60.0)), Sample((1.0, 2.0, 20.0)))
    2.0
    """
    return (ours / reference).median


def _in_turn(index: int, ours: Callable[[], T], reference: Callable[[], T]) -> tuple[T, T]:
    if index % 2 == 0:
        first = ours()
        return first, reference()
    first = reference()
    return ours(), first


def _seconds(call: Callable[[], object]) -> float:
    gc.collect()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _samples(pairs: Sequence[tuple[float, float]]) -> tuple[Sample, Sample]:
    ours, reference = zip(*pairs, strict=True)
    return Sample(ours), Sample(reference)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable automatic garbage collection inside the block."""
    enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    # Collections between calls then do not traverse the objects that already exist.
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
