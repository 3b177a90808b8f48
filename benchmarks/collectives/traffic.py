"""The bytes and steps of compiled collectives compared with formulas; no device runs anything.

Separate processes compute the rows, since the number of devices is fixed when jax starts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.collectives.program import compile_local, make_mesh, split
from benchmarks.core import child
from benchmarks.core.report import Figure, Listing, Sheet, apart
from jaxdist.collectives import operations
from jaxdist.collectives.algorithms.auto import FLAT, HIERARCHICAL, label
from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.collectives.contract import KINDS, Algorithm, Operation
from jaxdist.hlo import Ledger, ledger
from jaxdist.hlo.parse import Module, parse
from jaxdist.hlo.schedule import collective_kind
from jaxdist.mesh import Device
from jaxdist.runtime.topology import topology_devices

CPU_SIZES = (2, 3, 4, 5, 6, 7, 8, 16, 64)
TPU_SIZES = {
    "v5e:2x4": (2, 4, 8),
    "v5e:8x8": (16, 64),
    "v5p:4x4x12": (3, 6),
    "v5p:4x4x20": (5,),
    "v5p:4x4x28": (7,),
}
"""The axis sizes for which collectives are compiled, by the name of the TPU topology."""
ALL_KINDS_SIZES = {"cpu": (3, 8), "tpu": (8,)}
"""The sizes for which every operation is compiled; other sizes have only all_reduce.

XLA:TPU has no reduce-scatter over an odd number of devices, and may add dependencies between
chains of collectives.
"""
TWO_LEVELS = ((2, 2), (2, 4), (4, 2), (3, 2), (8, 8))
ELEMENTS_PER_DEVICE = 4096


@dataclass(frozen=True)
class TrafficRow:
    """The bytes and steps of one compiled collective, measured and by formula."""

    platform: str
    algorithm: str
    kind: str
    sizes: tuple[int, ...]
    sent_bytes: float
    formula_bytes: float
    steps: int | None
    """The length of the longest chain of dependent collectives, or None for XLA's own collectives,
    which do not show it."""
    formula_steps: int


def figures(platform: str, found: Sequence[TrafficRow]) -> list[Figure]:
    """Return bytes and steps of the row that is farthest above or below its formula."""
    stepped = [row for row in found if row.steps is not None]

    def note(rows: Sequence[TrafficRow], last: str = "") -> Callable[[TrafficRow], str]:
        words = f"{len(rows)} programs for {platform}; the farthest from its formula: "
        return lambda row: f"{words}{_name(row)}{last}"

    return [
        Figure.worst(
            f"bytes sent, {platform}", found, lambda row: (row.sent_bytes, row.formula_bytes),
            "<= 1.000", "bytes", note(found), either=True,
        ),
        Figure.worst(
            f"steps, {platform}", stepped, lambda row: (row.steps or 0, row.formula_steps),
            "<= 1.000", "", note(stepped, "; XLA keeps its own to itself"), either=True,
        ),
    ]  # fmt: skip


def listing(found: Sequence[TrafficRow]) -> Listing:
    """List each algorithm's number of programs, and the largest error of its formula."""
    groups: dict[tuple[str, str], list[TrafficRow]] = {}
    for row in found:
        groups.setdefault((row.platform, row.algorithm), []).append(row)
    return by_algorithm(list(groups.values()))


def _worst_steps(rows: Sequence[TrafficRow]) -> str | None:
    offs = [apart(row.steps, row.formula_steps) for row in rows if row.steps is not None]
    return f"{max(offs):.3f}" if offs else None


by_algorithm = Sheet[Sequence[TrafficRow]](
    "compiled programs over the formula, the worst of each algorithm",
    {
        "platform": lambda rows: rows[0].platform,
        "algorithm": lambda rows: rows[0].algorithm,
        "programs": len,
        "bytes": lambda rows: f"{max(apart(r.sent_bytes, r.formula_bytes) for r in rows):.3f}",
        "steps": _worst_steps,
    },
)


def _name(row: TrafficRow) -> str:
    return f"{row.kind} by {row.algorithm} on {'x'.join(map(str, row.sizes))} devices"


def rows(platform: str, devices: Sequence[Device], counts: Sequence[int]) -> Iterator[TrafficRow]:
    """Yield a row for every algorithm, operation and size that fits the devices."""
    for count in counts:
        kinds = KINDS if count in ALL_KINDS_SIZES[platform] else KINDS[:1]
        for algorithm, kind in itertools.product(FLAT, kinds):
            yield row(platform, devices, algorithm, kind, (count,))
    for sizes in TWO_LEVELS:
        if math.prod(sizes) <= len(devices) and math.prod(sizes) in counts:
            for algorithm in HIERARCHICAL:
                yield row(platform, devices, algorithm, "all_reduce", sizes)


def row(
    platform: str,
    devices: Sequence[Device],
    algorithm: Algorithm,
    kind: Operation,
    sizes: tuple[int, ...],
) -> TrafficRow:
    """Compile a collective over `sizes` devices, and read its bytes and steps from the program.

    A program is always compiled for a whole TPU topology. If `sizes` have fewer devices, all
    devices of the topology form groups of this number, which run at the same time.
    """
    count = math.prod(sizes)
    whole = len(devices) if platform == "tpu" else count
    names = tuple(f"axis{index}" for index in range(len(sizes)))
    mesh = make_mesh(devices[:whole], (whole // count, *sizes), ("beside", *names))
    compiled = compile_collective(mesh, names, algorithm, kind, count)
    payload_bytes = ELEMENTS_PER_DEVICE * count * 4
    formula = algorithm.traffic(kind, payload_bytes, sizes if len(sizes) > 1 else count)
    found = ledger(compiled, mesh)
    own = isinstance(algorithm, Xla)
    return TrafficRow(
        platform,
        label(algorithm),
        kind,
        sizes,
        found.sent_bytes() if own else busiest_sent_bytes(found),
        formula.sent_bytes,
        None if own else longest_chain(parse(compiled.as_text() or "")),
        formula.steps,
    )


def compile_collective(
    mesh: Mesh, names: tuple[str, ...], algorithm: Algorithm, kind: Operation, count: int
) -> jax.stages.Compiled:
    """Compile one call on a payload of `count` times `ELEMENTS_PER_DEVICE` floats."""
    operation = partial(getattr(operations, kind), axis=names, algorithm=algorithm)
    share = 1 if kind == "all_gather" else count
    elements = ELEMENTS_PER_DEVICE * share * mesh.size
    x = jax.ShapeDtypeStruct((elements,), jnp.float32, sharding=split(mesh))
    return compile_local(operation, mesh, x)


def busiest_sent_bytes(found: Ledger) -> float:
    """Return the bytes that the busiest device sends.

    Permutes are counted by their pairs, other collectives by the ledger's formula.
    """
    sent = Counter[int]()
    everybody = 0.0
    for collective in found.collectives:
        if collective.kind == "collective-permute":
            for source, target in collective.groups:
                if source != target:
                    sent[source] += collective.times_high * collective.payload_bytes
        else:
            everybody += collective.times_high * collective.sent_bytes
    return everybody + max(sent.values(), default=0)


def longest_chain(module: Module) -> int:
    """Return the length of the longest chain of collectives that need each other's results."""

    @cache
    def inside(name: str) -> int:
        ends: dict[str, int] = {}
        for instruction in module.computations[name].instructions:
            callees = (*instruction.called("calls"), *instruction.called("to_apply"))
            callees += instruction.called("body")
            own = max(map(inside, callees), default=0) + (collective_kind(instruction) is not None)
            assert not own or instruction.opcode != "while", "a loop of collectives has no length"
            before = max((ends[operand] for operand in instruction.operands), default=0)
            ends[instruction.name] = before + own
        return max(ends.values(), default=0)

    return inside(module.entry.name)


def platform_rows(platform: str) -> Iterator[TrafficRow]:
    """Yield every row of the platform, "cpu" or "tpu"."""
    if platform == "cpu":
        yield from rows(platform, jax.devices(), CPU_SIZES)
    else:
        for topology, counts in TPU_SIZES.items():
            yield from rows(platform, topology_devices(topology), counts)


measure = child.apart(
    platform_rows,
    "compiling the programs for {}",
    devices=lambda platform: max(CPU_SIZES) if platform == "cpu" else None,
)
"""A function that returns the rows of a platform, "cpu" or "tpu", from another process."""
