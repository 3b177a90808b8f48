"""The measured times of collectives on the hosts of the lab, and the speed of a host's work.

A message between processes that share a machine's cores takes more time than its bytes need:
gloo's threads and the kernel take turns with all other work, and each kind of collective sends its
own number of messages. Therefore each kind is timed in the groups that programs have, at some
sizes; other sizes are interpolated linearly.
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
"""The payload bytes at which a collective is timed."""
REPEATED = 5
"""The number of collectives of a probe, each of which takes the result of the previous one."""
_CPU = DEVICES["cpu"]


@dataclass(frozen=True, order=True)
class Sort:
    """A kind of collective and the size of its groups, which all run at the same time."""

    kind: str
    group_size: int


@dataclass(frozen=True)
class Curve:
    """The measured seconds of one sort of collective.

    Attributes:
      sort: the sort of collective.
      sizes: the payload bytes at which it was timed.
      seconds: the seconds of one collective at each size.
    """

    sort: Sort
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, size_bytes: float) -> float:
        """Return the seconds at any size; above the last size the last slope is extrapolated.

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
      curves: the curve of each sort of collective in the simulated programs.
      slower: the time of a host's work, divided by the time of the same work on the CPU of
        `jaxdist.runtime.hardware`.
    """

    curves: Mapping[Sort, Curve]
    slower: float = 1.0

    def cycles(self, count: int) -> float:
        """Raise AssertionError, since programs for CPUs have no estimates in cycles."""
        raise AssertionError("a CPU program with cycles")

    def transfer(self, collective: Collective) -> tuple[float, frozenset[Resource]]:
        """Return the seconds of a collective, and the resources that it takes.

        XLA's programs for CPUs send each array of a combined collective separately.
        """
        if collective.group_size == 1:
            return 0.0, frozenset()
        curve = self.curves[sort_of(collective)]
        return sum(map(curve.at, collective.array_bytes)), frozenset({0})

    def copy(self, size_bytes: int, *, host: bool) -> float:
        """Return the seconds of a copy."""
        return self.slower * size_bytes / _CPU.memory_bytes_per_second

    def work(self, effort: Effort) -> tuple[float, str]:
        """Return the seconds of the FLOPs or of the bytes, whichever take longer."""
        compute = effort.flops / _CPU.flops_per_second["float32"]
        memory = effort.bytes / _CPU.memory_bytes_per_second
        return self.slower * max(compute, memory), effort.what


def sort_of(collective: Collective) -> Sort:
    return Sort(collective.kind, collective.group_size)


def sorts_of(collectives: Iterable[Collective]) -> list[Sort]:
    """Return the sorts of all collectives among at least two hosts, which thus send bytes."""
    return sorted({sort_of(one) for one in collectives if one.group_size > 1})


def sizes_of(sort: Sort) -> tuple[int, ...]:
    """Return the payload bytes to time; the smallest payload has one float32 for each host."""
    least = 4 if sort.kind in ("all-reduce", "collective-permute") else 4 * sort.group_size
    return (least, *(size for size in SIZES if size > least))


def probe(sort: Sort, size_bytes: int) -> Callable[[], None]:
    """Return a function that runs a `probe_program` once."""
    run, x = probe_program(sort, size_bytes)
    return lambda: jax.block_until_ready(run(x))


def probe_program(sort: Sort, size_bytes: int) -> tuple[jax.stages.Compiled, jax.Array]:
    """Compile `REPEATED` collectives among all hosts; return the program and its argument of ones.

    Args:
      sort: the sort of collective.
      size_bytes: the bytes of the payload, as `Collective.payload_bytes` counts it.
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
    # Each takes the previous result, so that XLA can neither combine nor drop any of them.
    for _ in range(REPEATED):
        x = _ONE[sort.kind](x, sort.group_size)
    return x


def _permuted(x: jax.Array, size: int) -> jax.Array:
    return jax.lax.ppermute(x, "members", [(host, (host + 1) % size) for host in range(size)])


# Each result has the size of its input, to be the next input, and means keep its values at 1.
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
    """Return the curve of each sort, from the probes' seconds in the order of sorts and sizes."""
    found, left = {}, iter(seconds)
    for sort in sorts:
        sizes = sizes_of(sort)
        found[sort] = Curve(sort, sizes, tuple(next(left) / REPEATED for _ in sizes))
    return found
