"""All-reduce on slow links: real time between hosts of a lab, against the wire and the cost model.

One process a host, one CPU device a process, gloo between them. `bench` builds the lab and judges;
this module as a program is what each host runs.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from pydantic import TypeAdapter

from benchmarks.collectives.program import compile_local, split
from benchmarks.core import lab
from benchmarks.core.harness import REPEATS, WARMUP, Sample
from benchmarks.core.report import Figure, Report
from jaxdist.collectives import Algorithm, Hierarchical, Ring, Xla, all_reduce
from jaxdist.collectives.algorithms.build import ReduceConfig
from jaxdist.collectives.cost import Level, predict_seconds
from jaxdist.errors import RunError
from jaxdist.mesh import MeshConfig, Split, axis_names, build_mesh
from jaxdist.runtime.connection import connected
from jaxdist.runtime.environment import plan_environment, python_module
from jaxdist.runtime.hardware import DEVICES, Link
from jaxdist.runtime.processes import find_processes
from jaxdist.types import Json

PAYLOAD_BYTES = 4 * 2**20
WIRE_GOAL = "<= 1.15"
BYTES_GOAL = "<= 1.05"
GAIN_GOAL = ">= 0.85"
NESTED = Hierarchical(inside=Ring(), across=Xla())
MESSAGE_SECONDS = DEVICES["cpu"].slow.latency_seconds
"""What a message costs beside its bytes: gloo, and the wake-up of its receiver."""
_FOUND = "measured: "
_ALGORITHMS = TypeAdapter[Algorithm](ReduceConfig)


@dataclass(frozen=True)
class Measured:
    """One algorithm in one lab.

    Attributes:
      seconds: of each call, from when all hosts are ready to when the last one has its result.
      sent_bytes: what the busiest host sent per call, with the headers of its packets.
    """

    seconds: tuple[float, ...]
    sent_bytes: float


def bench() -> Report:
    """Two hosts on a slow link; two pairs of hosts, fast inside and slow between.

    Skipped, with the reason in the report, where the lab cannot be built.

    Raises:
      RunError: a host fails.
    """
    flat, pairs = lab.Lab(sites=2), lab.Lab(sites=2, hosts_per_site=2)
    reason = lab.unavailable(pairs)
    figures = (
        [Figure("slow-link lab", math.nan, math.nan, unit="", note=f"skipped: {reason}")]
        if reason
        else [*wire_figures(flat), *two_level_figures(pairs)]
    )
    return Report("collectives --lab", figures)


def wire_figures(hosts: lab.Lab, payload_bytes: int = PAYLOAD_BYTES) -> list[Figure]:
    """The time of `psum` and of a ring against what the wire allows, and the ring's bytes."""
    psum, ring = measure(hosts, [Xla(), Ring()], payload_bytes)
    sent_bytes = Ring().traffic("all_reduce", payload_bytes, hosts.size).sent_bytes
    limit_seconds = sent_bytes * 8 / hosts.across.bits_per_s
    where = f"{hosts.size} hosts"
    return [
        _timed(
            f"psum, {where}",
            psum,
            limit_seconds,
            WIRE_GOAL,
            f"{_shown(hosts, payload_bytes)}; the reference is the wire: 2(N-1)/N of the bytes at "
            f"its rate (TCP's own headers make {lab.FRAME_BYTES / lab.SEGMENT_BYTES:.3f} of it)",
        ),
        _timed(
            f"ring, {where}",
            ring,
            limit_seconds,
            note="between two hosts about 2: gloo sends one way at a time when two processes "
            "exchange blocks by a permute",
        ),
        Figure(
            f"ring's bytes, {where}",
            ring.sent_bytes,
            sent_bytes,
            BYTES_GOAL,
            "bytes",
            "per call, as the busiest host's kernel counted them, against the formula",
        ),
    ]


def two_level_figures(hosts: lab.Lab, payload_bytes: int = PAYLOAD_BYTES) -> list[Figure]:
    """Flat and hierarchical all-reduce against the cost model, and the gain against its gain."""
    chosen: list[Algorithm] = [Ring(), NESTED, Xla()]
    flat, nested, psum = measure(hosts, chosen, payload_bytes)
    flat_seconds, nested_seconds, psum_seconds = (
        predict(hosts, algorithm, payload_bytes) for algorithm in chosen
    )
    where = f"{hosts.sites} x {hosts.hosts_per_site} hosts"
    gains = [a / b for a, b in zip(flat.seconds, nested.seconds, strict=True)]
    return [
        _timed(
            f"flat ring, {where}",
            flat,
            flat_seconds,
            note=f"{_shown(hosts, payload_bytes)}; the reference is `predict_seconds` for these "
            f"links and {MESSAGE_SECONDS * 1e3:g} ms a message",
        ),
        _timed(f"psum, {where}", psum, psum_seconds, note="gloo's, predicted as a flat ring"),
        _timed(f"hierarchical, {where}", nested, nested_seconds, note="psum across, ring inside"),
        Figure(
            f"hierarchical's gain, {where}",
            statistics.median(gains),
            flat_seconds / nested_seconds,
            GAIN_GOAL,
            "x",
            "how many times faster than the flat ring: measured, and predicted",
            Sample(tuple(gains)).iqr,
        ),
    ]


def predict(hosts: lab.Lab, algorithm: Algorithm, payload_bytes: int) -> float:
    """Seconds of an all-reduce in the lab by the cost model, a device's links as `tc` makes them.

    >>> pairs = lab.Lab(sites=2, hosts_per_site=2)
    >>> flat, nested = (predict(pairs, one, PAYLOAD_BYTES) for one in (Ring(), NESTED))
    >>> round(flat / nested, 2)
    2.87
    """
    sizes = ((hosts.sites, hosts.across), (hosts.hosts_per_site, hosts.inside))
    levels = [
        Level(size, Link(MESSAGE_SECONDS + link.delay_seconds, link.payload_bytes_per_s))
        for size, link in sizes
    ]
    return predict_seconds(algorithm, "all_reduce", payload_bytes, levels)


def measure(
    hosts: lab.Lab,
    algorithms: Sequence[Algorithm],
    payload_bytes: int,
    *,
    warmup: int = WARMUP,
    repeats: int = REPEATS,
) -> list[Measured]:
    """Time an all-reduce of float32 by each algorithm, interleaved, over all hosts of the lab.

    Raises:
      RunError: this machine cannot hold the lab, a host fails, or a result is wrong.
    """
    task = {
        "sites": hosts.sites,
        "hosts_per_site": hosts.hosts_per_site,
        "algorithms": [algorithm.model_dump() for algorithm in algorithms],
        "payload_bytes": payload_bytes,
        "warmup": warmup,
        "repeats": repeats,
    }
    command = python_module("benchmarks.collectives.lab", json.dumps(task))
    printed = lab.run(hosts, command, environ=one_device(os.environ))
    (found,) = (line for line in printed.splitlines() if line.startswith(_FOUND))
    measured = json.loads(found.removeprefix(_FOUND))
    return [Measured(tuple(one["seconds"]), one["sent_bytes"]) for one in measured]


def one_device(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a host: without this process's fake devices."""
    ours = ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")
    kept = {name: value for name, value in environ.items() if name not in ours}
    return {**kept, **plan_environment(kept, fake_devices=1)}


def _timed(
    name: str, measured: Measured, reference: float, goal: str = "", note: str = ""
) -> Figure:
    sample = Sample(measured.seconds)
    return Figure(name, sample.median, reference, goal, "s", note, sample.iqr)


def _shown(hosts: lab.Lab, payload_bytes: int) -> str:
    across, inside = hosts.across, hosts.inside
    delay = f" and {across.delay_seconds * 1e3:g} ms" if across.delay_seconds else ""
    near = f", {inside.bits_per_s / 1e6:g} inside" if hosts.hosts_per_site > 1 else ""
    links = f"{across.bits_per_s / 1e6:g} Mbit/s{delay} between sites{near}"
    return f"{payload_bytes / 2**20:g} MiB, {links}"


# What each host runs.


def host(task: Mapping[str, Json]) -> list[Measured]:
    """Time the task's algorithms among all processes; the same on each of them."""
    sizes = Split(dcn=task["sites"], ici=task["hosts_per_site"])
    mesh = build_mesh(MeshConfig(data=sizes))
    axes = axis_names(mesh, "data")
    x, total = _numbers(mesh, task["payload_bytes"] // 4)
    calls = []
    for chosen in task["algorithms"]:
        algorithm = _ALGORITHMS.validate_python(chosen)
        reduce = partial(all_reduce, axis=axes, algorithm=algorithm)
        call = compile_local(reduce, mesh, x)
        check_sum(np.asarray(call(x).addressable_shards[0].data), total, algorithm)
        calls.append(partial(call, x))
    return _interleave(calls, warmup=task["warmup"], repeats=task["repeats"])


def check_sum(found: np.ndarray, expected: np.ndarray, algorithm: Algorithm) -> None:
    """Hold a result of this process against the exact sum.

    Raises:
      RunError: they differ; a time of wrong results is worth nothing.
    """
    wrong = np.flatnonzero(found != expected)
    if wrong.size:
        first = wrong[0]
        raise RunError(
            f"{algorithm!r} gives {found[first]:g} instead of {expected[first]:g} at element "
            f"{first} on process {jax.process_index()}, {wrong.size} of {found.size} are wrong: "
            "see `pytest tests/collectives`"
        )


def _numbers(mesh: Mesh, size: int) -> tuple[jax.Array, np.ndarray]:
    """Integers that differ by host, [N * size] over all hosts, and their sum, exact in float32."""
    base = (np.arange(size) % 251).astype(np.float32)
    mine = base + jax.process_index()
    count = mesh.size
    x = jax.make_array_from_process_local_data(split(mesh), mine, (count * size,))
    return x, base * count + count * (count - 1) / 2


def _interleave(
    calls: Sequence[Callable[[], jax.Array]], *, warmup: int, repeats: int
) -> list[Measured]:
    """Each call once a round, the first one changing; the slowest host's time counts."""
    seconds = np.zeros((len(calls), warmup + repeats))
    sent = np.zeros_like(seconds)
    for round_ in range(warmup + repeats):
        for turn in range(len(calls)):
            index = (round_ + turn) % len(calls)
            multihost_utils.sync_global_devices("ready")
            sent_before, start = _sent_bytes(), time.perf_counter()
            jax.block_until_ready(calls[index]())
            seconds[index, round_] = time.perf_counter() - start
            multihost_utils.sync_global_devices("done")
            sent[index, round_] = _sent_bytes() - sent_before
    everywhere = multihost_utils.process_allgather(np.stack([seconds, sent]).astype(np.float32))
    slowest, busiest = np.asarray(everywhere)[..., warmup:].max(axis=0)
    return [
        Measured(tuple(map(float, times)), float(np.median(counts)))
        for times, counts in zip(slowest, busiest, strict=True)
    ]


def _sent_bytes() -> int:
    return device_sent_bytes(Path("/proc/self/net/dev").read_text(encoding="ascii"), "eth0")


def device_sent_bytes(table: str, device: str) -> int:
    """Bytes sent through `device` by the kernel's table of /proc/net/dev: the ninth number.

    >>> device_sent_bytes("face |bytes ...\\n eth0: 11 2 0 0 0 0 0 0 77 3 0 0 0 0 0 0\\n", "eth0")
    77
    """
    rows = dict(line.strip().split(":", 1) for line in table.splitlines() if ":" in line)
    return int(rows[device].split()[8])


def main(arguments: Sequence[str]) -> None:
    """Join the other hosts, run the task, and print what was measured (the first host does)."""

    def report(error: BaseException) -> int:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1

    with connected(find_processes(os.environ), report):
        measured = host(json.loads(arguments[0]))
        if jax.process_index() == 0:
            # In one piece, on a line of its own: gloo prints too, on all hosts.
            sys.stdout.write(f"\n{_FOUND}{json.dumps([asdict(one) for one in measured])}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
