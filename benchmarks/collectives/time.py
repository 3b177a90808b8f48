"""The wall time of all-reduces on this machine's devices, by algorithm and size, and by fusion."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.collectives.gloo import Gloo
from benchmarks.collectives.program import compile_local, make_mesh, split
from benchmarks.core.harness import Sample, interleave
from benchmarks.core.report import Figure, Listing
from jaxdist.collectives.algorithms.auto import FLAT, label
from jaxdist.collectives.algorithms.hierarchical import Hierarchical
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.collectives.bucket import reduce_tree
from jaxdist.collectives.contract import Algorithm
from jaxdist.collectives.operations import all_reduce
from jaxdist.hlo import Ledger, ledger
from jaxdist.mesh import Device

MEBIBYTE = 2**20
SIZES = tuple(4096 * 4**power for power in range(8))
"""The numbers of bytes on each device, from 4 KiB to 64 MiB."""
LARGE_BYTES = 16 * MEBIBYTE
RINGS = (Ring(), Ring(directions=2), Ring(chunks=2), Ring(directions=2, chunks=2))
ALGORITHMS: tuple[Algorithm, ...] = (*FLAT, Hierarchical())
TENSOR_COUNTS = (64, 200, 400)
SECONDS_A_SIZE = 0.25
"""The seconds that each algorithm and size of the table gets, unless three calls take longer."""
GLOO = "gloo"
GLOO_TIMES = 20
"""The number of small all-reduces in a call of gloo's processes, whose wake-up takes long."""
AXES = ("data_dcn", "data_ici")
Name = TypeVar("Name")


class Reduction:
    """A compiled all-reduce of one size.

    The values are zeros, which take as long as other values and never overflow.

    Args:
      donate: whether each call sums the result of the previous call in place. Otherwise the input
        is kept.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        size_bytes: int,
        devices: Sequence[Device],
        *,
        donate: bool = True,
    ):
        mesh = two_level_mesh(devices)
        x = jnp.zeros(size_bytes // 4 * len(devices), jnp.float32)
        self._x = jax.device_put(x, split(mesh))
        self.donate = donate
        reduce = partial(all_reduce, axis=AXES, algorithm=algorithm)
        self._run = compile_local(reduce, mesh, self._x, donate=donate)

    def __call__(self) -> None:
        result = jax.block_until_ready(self._run(self._x))
        if self.donate:
            self._x = result


def two_level_mesh(devices: Sequence[Device]) -> Mesh:
    """Return a mesh with two groups of devices if their number is even, else with one group."""
    outer = 2 if len(devices) % 2 == 0 else 1
    return make_mesh(devices, (outer, len(devices) // outer), AXES)


def large_figures(
    devices: Sequence[Device], gloo: Gloo | None, repeats: int, size_bytes: int
) -> list[Figure]:
    """Compare the fastest ring with psum, with and without donation, and with gloo if given."""
    name = f"{size_bytes // MEBIBYTE} MiB x {len(devices)}, ring"
    ring, in_place = fastest_ring(devices, size_bytes, donate=True)
    keeping, kept = fastest_ring(devices, size_bytes, donate=False)
    figures = []
    for run, what, note in ((ring, "", in_place), (keeping, ", input kept", kept)):
        psum = Reduction(Xla(), size_bytes, devices, donate=run.donate)
        times = interleave(run, psum, repeats=repeats)
        figures.append(Figure.compare(f"{name} over psum{what}", *times, "<= 2", note))
    if gloo is not None:
        peer = interleave(ring, partial(gloo.all_reduce, size_bytes), repeats=repeats)
        note = f"torch.distributed, {len(devices)} processes of one thread, over loopback"
        figures.append(Figure.compare(f"{name} over gloo", *peer, "<= 1", note))
    return figures


def fastest_ring(
    devices: Sequence[Device], size_bytes: int, *, donate: bool
) -> tuple[Reduction, str]:
    """Return the fastest of `RINGS`, and a note on the times of all of them."""
    rings = {ring: Reduction(ring, size_bytes, devices, donate=donate) for ring in RINGS}
    seconds = {ring: sample.median for ring, sample in rotate(rings, SECONDS_A_SIZE).items()}
    best = min(seconds, key=seconds.__getitem__)
    options = ", ".join(f"{label(ring)} {1e3 * found:.3g} ms" for ring, found in seconds.items())
    place = "in place (donated)" if donate else "into memory of its own (not donated)"
    return rings[best], f"{place}, by {label(best)}; medians: {options}"


def fusion_figures(devices: Sequence[Device], count: int, repeats: int) -> list[Figure]:
    """Compare a ring for each of `count` small tensors with one ring over a bucket of them."""
    fused, unfused = (
        TreeReduction(Ring(bucket_bytes=size), count, devices) for size in ("auto", None)
    )
    times = interleave(unfused, fused, warmup=1, repeats=repeats)
    permutes = [run.ledger.count("collective-permute") for run in (unfused, fused)]
    kibibytes = fused.payload_bytes // 1024
    name = f"{count} tensors fused"
    return [
        Figure.compare(f"{name}: time", *times, ">= 4", f"{kibibytes} KiB together"),
        Figure(f"{name}: permutes", *permutes, goal=">= 60", unit=""),
    ]


class TreeReduction:
    """A compiled `reduce_tree` of small tensors of several shapes, which sums zeros in place."""

    def __init__(self, algorithm: Algorithm, count: int, devices: Sequence[Device]):
        mesh = make_mesh(devices, (len(devices),), ("data",))
        shapes = [(16 * (1 + index % 4), 32) for index in range(count)]
        self._tree = [
            jax.device_put(jnp.zeros((rows * len(devices), columns)), split(mesh))
            for rows, columns in shapes
        ]
        self.payload_bytes = sum(4 * rows * columns for rows, columns in shapes)
        reduce = partial(reduce_tree, axis="data", algorithm=algorithm)
        self._run = compile_local(reduce, mesh, self._tree, donate=True)
        self.ledger: Ledger = ledger(self._run, mesh)

    def __call__(self) -> None:
        self._tree = jax.block_until_ready(self._run(self._tree))


def by_size(
    devices: Sequence[Device],
    gloo: Gloo | None,
    *,
    sizes: Sequence[int],
    algorithms: Sequence[Algorithm],
) -> dict[str, dict[int, float]]:
    """Return the median seconds of one all-reduce, by algorithm and then by number of bytes."""
    seconds: dict[str, dict[int, float]] = {}
    for size_bytes in sizes:
        runs: dict[str, Callable[[], object]] = {
            label(algorithm): Reduction(algorithm, size_bytes, devices) for algorithm in algorithms
        }
        times = GLOO_TIMES if size_bytes <= MEBIBYTE else 1
        if gloo is not None:
            runs[GLOO] = partial(gloo.all_reduce, size_bytes, times)
        for name, sample in rotate(runs, SECONDS_A_SIZE).items():
            once = sample.median / (times if name == GLOO else 1)
            seconds.setdefault(name, {})[size_bytes] = once
    return seconds


def rotate(runs: Mapping[Name, Callable[[], object]], least_seconds: float) -> dict[Name, Sample]:
    """Time callables in turn, in rounds; the first round is not counted.

    Args:
      runs: the callables, by name.
      least_seconds: the rounds end when callables have taken this time on average, and at least
        three rounds are counted.
    """
    found: dict[Name, list[float]] = {name: [] for name in runs}
    spent, rounds = 0.0, 0
    while rounds < 4 or spent < least_seconds * len(runs):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            elapsed = time.perf_counter() - start
            spent += elapsed
            if rounds:
                found[name].append(elapsed)
        rounds += 1
        # Garbage is collected between rounds, so that no callable is timed together with a
        # collection.
        gc.collect()
    return {name: Sample(tuple(seconds)) for name, seconds in found.items()}


def size_listing(seconds: Mapping[str, Mapping[int, float]], devices: int) -> Listing:
    """List times and bandwidths in the convention of nccl-tests.

    Algorithm bandwidth is the number of bytes on one device, divided by the time. Bus bandwidth is
    the algorithm bandwidth times 2 (n-1) / n. This is the least bandwidth that a link must have, so
    it can be compared with the speed of the link.
    """
    factor = 2 * (devices - 1) / devices
    rows = [
        (size, name, found, size / found / 1e9, factor * size / found / 1e9)
        for name, by_bytes in seconds.items()
        for size, found in by_bytes.items()
    ]
    columns = {"size": "B", "algorithm": "", "time": "s", "algbw": "GB/s", "busbw": "GB/s"}
    title = f"all-reduce of float32 on {devices} devices"
    return Listing(title, columns, sorted(rows, key=lambda row: row[0]))
