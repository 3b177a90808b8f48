"""A program that measures the loading of a model onto 8 devices with ZeRO 3.

`python -m benchmarks.models.loaded DIR` prints bytes, seconds of all cores from the page cache, and
seconds by the clock from the disk, as JSON, on Linux.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxdist.runtime import environment

environment.prepare(fake_devices=8)

import jax  # noqa: E402  (after the environment)
import numpy as np  # noqa: E402

from jaxdist.commands.import_model import synthetic_data  # noqa: E402
from jaxdist.experiment import build, load  # noqa: E402
from jaxdist.interchange.leaves import largest  # noqa: E402
from jaxdist.interchange.source import open_source  # noqa: E402
from jaxdist.run.loading.model import load_params, matched  # noqa: E402


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def read_once(files: set[Path]) -> None:
    """Pass the bytes of files through a buffer that is used again."""
    held = bytearray(1 << 22)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(held):
                pass


def read_whole(files: set[Path]) -> None:
    """Read the bytes of files into memory."""
    for path in files:
        np.fromfile(path, np.uint8)


def cpu_seconds(act: Callable[[], object]) -> float:
    """Return the fewest seconds of all cores that three calls take."""
    found = []
    for _ in range(3):
        begun = time.process_time()
        act()
        found.append(time.process_time() - begun)
    return min(found)


def cold_seconds(acts: Sequence[Callable[[], object]], files: set[Path]) -> list[float]:
    """Return the fewest seconds by the clock of three calls of each function, from the disk.

    The functions take turns, and the page cache drops the files before each call.
    """
    found: list[list[float]] = [[] for _ in acts]
    for _ in range(3):
        for act, seconds in zip(acts, found, strict=True):
            for path in files:
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # only written pages are dropped
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            begun = time.perf_counter()
            act()
            seconds.append(time.perf_counter() - begun)
    return [min(seconds) for seconds in found]


def main(path: Path) -> None:
    source = open_source(path)
    config = {
        "model": source.family.model(source.config),
        "data": synthetic_data(source),
        "optim": {"type": "adamw", "learning_rate": 1e-4},
        "train": {"steps": 1, "batch_size": 8},
        "mesh": {"data": 8},
        "parallel": {"zero": {"stage": 3}},
    }
    program = build(load(config)[1]).program
    _ = program.state_shapes
    leaves = matched(program, path)
    files = {tensor.file for tensor in source.tensors.values()}
    # The first reading fills the page cache, so that the timed reading and the loading both use it.
    through = cpu_seconds(lambda: read_once(files))
    # Memory is measured before anything large is freed, since the allocator may keep freed memory,
    # which would be resident before the loading.
    before, most, ended = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    params = jax.block_until_ready(load_params(program, leaves))
    ended.set()
    watcher.join()
    shards = [s.data.nbytes for leaf in jax.tree.leaves(params) for s in leaf.addressable_shards]
    held = sum(shards)
    del params, shards
    read = cpu_seconds(lambda: read_whole(files))

    def load_all() -> None:
        jax.block_until_ready(load_params(program, leaves))

    seconds = cpu_seconds(load_all)
    cold, cold_read = cold_seconds([load_all, lambda: read_whole(files)], files)
    found = {"excess": most[0] - before - held, "largest": largest(leaves), "shards": held}
    found |= {"seconds": seconds, "read": read, "through": through}
    print(json.dumps({**found, "cold": cold, "cold_read": cold_read}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
