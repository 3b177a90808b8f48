"""The time of a collective on the hosts of the lab, found by collectives alone, and a host's work.

A message between processes that share a machine's cores costs more than its bytes: gloo's threads
and the kernel take turns with all else, and each kind of collective sends its own number of
messages. So each kind is timed, in the groups and at some sizes that programs have, and what lies
between two sizes is taken from the straight line between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.collectives.program import compile_local, make_mesh, split
from jaxdist.hlo.entries import Resource
from jaxdist.hlo.estimates import Effort
from jaxdist.hlo.records import Collective
from jaxdist.runtime.hardware import DEVICES

SIZES = (4, 64, 2**15, 2**17, 2**19, 2**21)
"""Payload bytes at which a collective is timed."""
REPEATED = 5
"""So many of them one after the other, each of what the one before gave."""
_CPU = DEVICES["cpu"]


@dataclass(frozen=True, order=True)
class Sort:
    """Collectives of one kind among so many hosts, all groups at once."""

    kind: str
    group_size: int


@dataclass(frozen=True)
class Curve:
    """The seconds of such a collective.

    Attributes:
      seconds: of one, by the payload bytes in `sizes`.
    """

    sort: Sort
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, size_bytes: float) -> float:
        """Seconds at any size; above the last one it goes on as before.

        >>> curve = Curve(Sort("all-reduce", 4), (4, 100, 200), (1.0, 1.0, 2.0))
        >>> curve.at(4), curve.at(150), curve.at(400)
        (1.0, 1.5, 4.0)
        """
        if size_bytes <= self.sizes[-1]:
            return float(np.interp(size_bytes, self.sizes, self.seconds))
        rise = self.seconds[-1] - self.seconds[-2]
        slope = rise / (self.sizes[-1] - self.sizes[-2])
        return self.seconds[-1] + slope * (size_bytes - self.sizes[-1])


@dataclass(frozen=True)
class Rates:
    """The speeds of a host of the lab, for `jaxdist.hlo.timeline`.

    Attributes:
      curves: of each sort of collective that is asked for.
      slower: a host's work over that of the CPU in `jaxdist.runtime.hardware`.
    """

    curves: Mapping[Sort, Curve]
    slower: float = 1.0

    def cycles(self, count: int) -> float:
        """CPU programs have no estimates."""
        raise AssertionError("a CPU program with cycles")

    def transfer(self, collective: Collective) -> tuple[float, frozenset[Resource]]:
        """Seconds of a collective.

        XLA's programs for CPUs send each array of a combined collective by itself.
        """
        if collective.group_size == 1:
            return 0.0, frozenset()
        curve = self.curves[sort_of(collective)]
        return sum(map(curve.at, collective.array_bytes)), frozenset({0})

    def copy(self, size_bytes: int, *, host: bool) -> float:
        """Seconds of a copy."""
        return self.slower * size_bytes / _CPU.memory_bytes_per_second

    def work(self, effort: Effort) -> tuple[float, str]:
        """Seconds of FLOPs or of bytes, whichever take longer."""
        compute = effort.flops / _CPU.flops_per_second["float32"]
        memory = effort.bytes / _CPU.memory_bytes_per_second
        return self.slower * max(compute, memory), effort.what


def sort_of(collective: Collective) -> Sort:
    return Sort(collective.kind, collective.group_size)


def sorts_of(collectives: Iterable[Collective]) -> list[Sort]:
    """All that have something to send."""
    return sorted({sort_of(one) for one in collectives if one.group_size > 1})


def sizes_of(sort: Sort) -> tuple[int, ...]:
    """Payload bytes that this sort can have: one number at least on each host that has a part."""
    least = 4 if sort.kind in ("all-reduce", "collective-permute") else 4 * sort.group_size
    return (least, *(size for size in SIZES if size > least))


def probe(sort: Sort, size_bytes: int) -> Callable[[], None]:
    """Takes the collectives of a `probe_program` once."""
    run, x = probe_program(sort, size_bytes)
    return lambda: jax.block_until_ready(run(x))


def probe_program(sort: Sort, size_bytes: int) -> tuple[jax.stages.Compiled, jax.Array]:
    """`REPEATED` collectives among all hosts, and an array of ones that they are called with.

    Args:
      size_bytes: of the payload, as `Collective.payload_bytes` counts it.
    """
    count = size_bytes // 4
    if sort.kind == "all-gather":
        count //= sort.group_size
    sizes = (jax.device_count() // sort.group_size, sort.group_size)
    mesh = make_mesh(jax.devices(), sizes, ("groups", "members"))
    sharding = split(mesh)
    whole = (count * mesh.size,)
    x = jax.make_array_from_callback(whole, sharding, lambda _: np.ones(count, np.float32))
    return compile_local(partial(_in_turn, sort), mesh, x), x


def _in_turn(sort: Sort, x: jax.Array) -> jax.Array:
    for _ in range(REPEATED):
        x = _ONE[sort.kind](x, sort.group_size)
    return x


def _permuted(x: jax.Array, size: int) -> jax.Array:
    return jax.lax.ppermute(x, "members", [(host, (host + 1) % size) for host in range(size)])


_ONE: Mapping[str, Callable[[jax.Array, int], jax.Array]] = {
    "all-reduce": lambda x, size: jax.lax.pmean(x, "members"),
    "all-gather": lambda x, size: jax.lax.all_gather(x, "members", tiled=True)[: x.size],
    "reduce-scatter": lambda x, size: jnp.tile(
        jax.lax.psum_scatter(x, "members", tiled=True) / size, size
    ),
    "all-to-all": lambda x, size: jax.lax.all_to_all(x, "members", 0, 0, tiled=True),
    "collective-permute": _permuted,
}


def curves_of(sorts: Sequence[Sort], seconds: Sequence[float]) -> dict[Sort, Curve]:
    """Return the curves that probes of these sorts give, in the order of `sorts` and sizes."""
    found, left = {}, iter(seconds)
    for sort in sorts:
        sizes = sizes_of(sort)
        found[sort] = Curve(sort, sizes, tuple(next(left) / REPEATED for _ in sizes))
    return found
