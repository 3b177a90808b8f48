"""The time of all-reduces between the hosts of a lab, compared with links and the cost model.

`bench` builds the lab and compares the times; each host runs `host`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks.collectives.program import compile_local, split
from benchmarks.core import lab
from benchmarks.core.harness import REPEATS, WARMUP, Sample
from benchmarks.core.hosts import Timed, Turn, clocked, in_rounds, on_hosts
from benchmarks.core.report import Figure, Report
from jaxdist.collectives import Algorithm, Hierarchical, Ring, Xla, all_reduce
from jaxdist.collectives.algorithms.build import ReduceConfig
from jaxdist.collectives.cost import Level, predict_seconds
from jaxdist.errors import RunError
from jaxdist.mesh import MeshConfig, Split, axis_names, build_mesh
from jaxdist.runtime.hardware import DEVICES, Link

PAYLOAD_BYTES = 4 * 2**20
WIRE_GOAL = "<= 1.15"
BYTES_GOAL = "<= 1.05"
GAIN_GOAL = ">= 0.85"
NESTED = Hierarchical(inside=Ring(), across=Xla())
MESSAGE_SECONDS = DEVICES["cpu"].slow.latency_seconds
"""The seconds that gloo and the wake-up of the receiver add to the time of a message's bytes."""


def bench() -> Report:
    """Measure two hosts on a slow link, and two pairs of hosts: fast links in a pair, slow between.

    If the lab cannot be built here, the bench is skipped, and the report has the reason.

    Raises:
      RunError: a host fails.
    """
    flat, pairs = lab.Lab(sites=2), lab.Lab(sites=2, hosts_per_site=2)
    reason = lab.unavailable(pairs)
    if reason:
        return Report("collectives --lab", [Figure.skipped("slow-link lab", reason)])
    return Report("collectives --lab", [*wire_figures(flat), *two_level_figures(pairs)])


def wire_figures(hosts: lab.Lab, payload_bytes: int = PAYLOAD_BYTES) -> list[Figure]:
    """Compare the times of `psum` and of a ring with the link's limit, and the ring's bytes."""
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
    """Compare flat and hierarchical all-reduces, and their speedup, with the cost model."""
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
    """Return the seconds of an all-reduce by the cost model, with the links that `tc` makes.

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
) -> list[Timed]:
    """Time an all-reduce of float32 by each algorithm, interleaved, over all hosts of the lab.

    Seconds count from the moment when all hosts are ready until the last host has its result.

    Raises:
      RunError: this machine cannot hold the lab, a host fails, or a result is wrong.
    """
    return on_hosts(hosts, host, hosts, algorithms, payload_bytes, warmup, repeats)


def _timed(name: str, measured: Timed, reference: float, goal: str = "", note: str = "") -> Figure:
    sample = Sample(measured.seconds)
    return Figure(name, sample.median, reference, goal, "s", note, sample.iqr)


def _shown(hosts: lab.Lab, payload_bytes: int) -> str:
    across, inside = hosts.across, hosts.inside
    delay = f" and {across.delay_seconds * 1e3:g} ms" if across.delay_seconds else ""
    near = f", {inside.bits_per_s / 1e6:g} inside" if hosts.hosts_per_site > 1 else ""
    links = f"{across.bits_per_s / 1e6:g} Mbit/s{delay} between sites{near}"
    return f"{payload_bytes / 2**20:g} MiB, {links}"


# The functions below run on each host.


def host(
    hosts: lab.Lab, algorithms: list[ReduceConfig], payload_bytes: int, warmup: int, repeats: int
) -> list[Timed]:
    """Time the algorithms among all processes; each process returns the same times."""
    mesh = build_mesh(MeshConfig(data=Split(dcn=hosts.sites, ici=hosts.hosts_per_site)))
    axes = axis_names(mesh, "data")
    x, total = _numbers(mesh, payload_bytes // 4)
    turns: dict[str, Turn] = {}
    for number, algorithm in enumerate(algorithms):
        call = compile_local(partial(all_reduce, axis=axes, algorithm=algorithm), mesh, x)
        check_sum(np.asarray(call(x).addressable_shards[0].data), total, algorithm)
        turns[str(number)] = clocked(lambda call=call: jax.block_until_ready(call(x)))
    return in_rounds(turns, warmup=warmup, repeats=repeats)


def check_sum(found: np.ndarray, expected: np.ndarray, algorithm: Algorithm) -> None:
    """Compare a result of this process with the exact sum.

    Raises:
      RunError: the two differ, so the time of this algorithm has no meaning.
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
    """Return integers that differ by host, [N * size], and their sum, which is exact in float32."""
    base = (np.arange(size) % 251).astype(np.float32)
    mine = base + jax.process_index()
    count = mesh.size
    x = jax.make_array_from_process_local_data(split(mesh), mine, (count * size,))
    return x, base * count + count * (count - 1) / 2
