"""A program that measures the loading of a model onto 8 devices with ZeRO 3.

`python -m benchmarks.models.loaded DIR` prints the memory and the seconds as JSON, on Linux.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from pathlib import Path

from jaxdist.runtime import environment

environment.prepare(fake_devices=8)

import jax  # noqa: E402  (after the environment)

from jaxdist.experiment import build, load  # noqa: E402
from jaxdist.interchange.source import open_source  # noqa: E402
from jaxdist.run.loading.model import load_params, matched  # noqa: E402


def resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def read_once(files: set[Path]) -> None:
    held = bytearray(1 << 22)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(held):
                pass


def main(path: Path) -> None:
    source = open_source(path)
    config = {
        "model": source.family.model(source.config),
        "data": {
            "type": "synthetic",
            "kind": "tokens",
            "window": 128,
            "vocab_size": source.vocab_size,
        },
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
    read_once(files)
    begun = time.perf_counter()
    read_once(files)
    read = time.perf_counter() - begun
    before, most, ended = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            most[0] = max(most[0], resident_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun = time.perf_counter()
    params = jax.block_until_ready(load_params(program, leaves))
    seconds = time.perf_counter() - begun
    ended.set()
    watcher.join()
    shards = [s.data.nbytes for leaf in jax.tree.leaves(params) for s in leaf.addressable_shards]
    # The bytes in float32, to which a tensor is converted.
    largest = max(4 * math.prod(leaf.tensors[0].shape) for leaf in leaves)
    found = {"excess": most[0] - before - sum(shards), "largest": largest}
    print(json.dumps({**found, "shards": sum(shards), "seconds": seconds, "read": read}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
