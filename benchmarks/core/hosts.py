"""Functions that all hosts of a lab call at once, and contenders that they time in turn.

Each host runs `python -m benchmarks.core.hosts MODULE:FUNCTION [JSON...]`: it joins the others and
calls the function, and the first host prints the results (see `benchmarks.core.child`).
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from benchmarks.core import child, lab
from benchmarks.core.lab import Lab
from jaxdist.runtime.connection import connected
from jaxdist.runtime.environment import plan_environment, plan_tunables
from jaxdist.runtime.processes import find_processes

T = TypeVar("T")
Turn = Callable[[], tuple[float, float]]
"""A function that takes a contender's steps; it returns their seconds and this host's last loss."""
FOUND = "measured: "


@dataclass(frozen=True)
class Timed:
    """The measurements of one contender in one lab.

    Attributes:
      name: the contender's name.
      seconds: by round, the time of a step on the slowest host.
      sent_bytes: the bytes that the busiest host sent in a step, with the headers of packets.
      loss: the mean over hosts of the loss before the last step.
    """

    name: str
    seconds: tuple[float, ...]
    sent_bytes: float
    loss: float


def on_hosts(hosts: Lab, function: Callable[..., Iterable[T]], *args: object) -> list[T]:
    """Call `function(*args)` on each host of a lab, and return the results of the first host.

    Each host has one process with one CPU device; gloo connects them.

    Raises:
      RunError: this machine cannot hold the lab, or a host fails.
    """
    run = child.command(function, *args, by=__name__)
    printed = lab.run(
        hosts, run, environ=host_environ(os.environ), timeout_seconds=child.TIMEOUT_SECONDS
    )
    (line,) = (line for line in printed.splitlines() if line.startswith(FOUND))
    return child.read(function, line.removeprefix(FOUND))


def host_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a host: one device, and the malloc settings of `jaxdist`."""
    # These may request fake devices for this process, which a host must not inherit.
    ours = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")
    kept = {name: value for name, value in environ.items() if name not in ours}
    kept |= plan_environment(kept, fake_devices=1)
    tunables = plan_tunables(kept, platform.libc_ver()[0])
    return kept if tunables is None else {**kept, "GLIBC_TUNABLES": tunables}


def clocked(call: Callable[[], object]) -> Turn:
    """Return a turn that times `call`, which must wait for its result, and may return a loss."""

    def turn() -> tuple[float, float]:
        start = time.perf_counter()
        loss = call()
        return time.perf_counter() - start, loss if isinstance(loss, float) else 0.0

    return turn


def in_rounds(
    turns: Mapping[str, Turn], *, warmup: int, repeats: int, steps: int = 1
) -> list[Timed]:
    """Time all contenders once in each round, in an order that rotates by one per round.

    All hosts must call this function, and all return the same result.

    Args:
      turns: the contenders by name.
      warmup, repeats: the number of rounds that are not counted, and of counted rounds.
      steps: the number of steps of each turn.
    """
    names, count = list(turns), warmup + repeats
    found = np.zeros((3, len(names), count), np.float64)
    for index in range(count):
        for place in range(len(names)):
            which = (index + place) % len(names)
            multihost_utils.sync_global_devices("ready")
            before = sent_bytes()
            seconds, loss = turns[names[which]]()
            # The counter is read after the barrier. Before the barrier, other hosts may still have
            # bytes in their buffers for which this host waits.
            multihost_utils.sync_global_devices("done")
            sent = sent_bytes() - before
            found[:, which, index] = seconds / steps, sent / steps, loss
    # jax has no float64 unless it is enabled.
    everywhere = np.asarray(multihost_utils.process_allgather(found.astype(np.float32)))
    everywhere = everywhere.reshape(-1, *found.shape)[..., warmup:]
    slowest, busiest = everywhere[:, 0].max(0), everywhere[:, 1].max(0)
    last = everywhere[:, 2, :, -1].mean(0)
    return [
        Timed(name, tuple(map(float, slowest[i])), float(np.median(busiest[i])), float(last[i]))
        for i, name in enumerate(names)
    ]


def sent_bytes() -> int:
    """Return the bytes that this host has sent so far, as its kernel counts them."""
    return device_sent_bytes(Path("/proc/self/net/dev").read_text(encoding="ascii"), "eth0")


def device_sent_bytes(table: str, device: str) -> int:
    """Return the bytes sent through `device`: the ninth number of its row in /proc/net/dev.

    >>> device_sent_bytes("face |bytes ...\\n eth0: 11 2 0 0 0 0 0 0 77 3 0 0 0 0 0 0\\n", "eth0")
    77
    """
    rows = dict(line.strip().split(":", 1) for line in table.splitlines() if ":" in line)
    return int(rows[device].split()[8])


def main(name: str, *args: str) -> None:
    """Join the other hosts and call the function; the first host prints its results."""

    def report(error: BaseException) -> int:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1

    with connected(find_processes(os.environ), report):
        found = child.answer(name, *args)
        if jax.process_index() == 0:
            # The line is written in one piece and after a line break, since gloo prints on all
            # hosts too.
            sys.stdout.write(f"\n{FOUND}{found}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
