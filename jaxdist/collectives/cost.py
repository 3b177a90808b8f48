"""How long a collective should take: the alpha-beta model, link by link, without a device.

A call of `steps` dependent messages takes `steps` latencies and the time of its bytes on the
busiest link (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
in MPICH", 2005). It knows nothing of computation beside it, nor of other traffic on the links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxdist.collectives.algorithms.halving import Halving
from jaxdist.collectives.algorithms.hierarchical import Hierarchical
from jaxdist.collectives.algorithms.ring import Ring
from jaxdist.collectives.algorithms.xla import Xla
from jaxdist.collectives.contract import Algorithm, Operation, Traffic
from jaxdist.runtime.hardware import Link


@dataclass(frozen=True)
class Level:
    """One axis of the mesh: how many devices are on it, and the link that joins them."""

    size: int
    link: Link


def predict_seconds(
    algorithm: Algorithm, kind: Operation, payload_bytes: float, levels: Sequence[Level]
) -> float:
    """Seconds of one call.

    Args:
      algorithm: any but `Auto`, which only chooses among the others.
      kind: the operation.
      payload_bytes: of the whole tensor on one device, as `Algorithm.traffic` counts it.
      levels: of each axis that the call names, slowest first.

    An algorithm that knows no levels treats all devices alike, so all of its steps and bytes are
    taken at the slowest link; a hierarchical one is taken phase by phase.

    >>> link = Link(latency_seconds=1e-5, bytes_per_second=1e9)
    >>> f"{predict_seconds(Ring(), 'all_reduce', 8e6, [Level(8, link)]):.6f}"
    '0.014140'
    """
    sizes = tuple(level.size for level in levels)
    if isinstance(algorithm, Hierarchical):
        parts = {"inside": levels[-1:], "across": levels[:-1]}
        return math.fsum(
            _seconds(getattr(algorithm, name), traffic, parts[name])
            for name, traffic in algorithm.phases(kind, payload_bytes, sizes)
        )
    if isinstance(algorithm, Xla):
        return _xla_seconds(kind, payload_bytes, levels)
    return _seconds(algorithm, algorithm.traffic(kind, payload_bytes, sizes), levels)


def _xla_seconds(kind: Operation, payload_bytes: float, levels: Sequence[Level]) -> float:
    """XLA does not tell which algorithm it runs: the fastest of ours is taken in its place.

    In memory it reads its peers' arrays where they lie: one rendezvous, each byte once.
    """
    if slowest(levels).topology == "memory" and math.prod(level.size for level in levels) > 1:
        return _seconds(Xla(), Traffic(1, payload_bytes, payload_bytes, 1), levels)
    flat = (Ring(directions=2), Halving())
    return min(predict_seconds(algorithm, kind, payload_bytes, levels) for algorithm in flat)


def slowest(levels: Sequence[Level]) -> Link:
    """The link that bounds a call over all levels: the narrowest one, with the latest's latency.

    An axis of one device has no link; without any other it does not matter which.
    """
    links = [level.link for level in levels if level.size > 1] or [level.link for level in levels]
    narrowest = min(links, key=lambda link: link.bytes_per_second)
    return replace(narrowest, latency_seconds=max(link.latency_seconds for link in links))


def _seconds(algorithm: Algorithm, traffic: Traffic, levels: Sequence[Level]) -> float:
    link = slowest(levels)
    busiest_bytes = max(traffic.serial_bytes, traffic.sent_bytes / link.ports)
    seconds = traffic.steps * link.latency_seconds + busiest_bytes / link.bytes_per_second
    if link.topology != "torus" or isinstance(algorithm, Ring | Xla):
        return seconds
    return seconds * _mean_hops(math.prod(level.size for level in levels))


def _mean_hops(size: int) -> float:
    """Links between sender and receiver of the logarithmic algorithms on a ring, over all steps.

    They send to devices 1, 2, 4, ... further on, through all that lie in between.
    """
    return (size - 1) / math.ceil(math.log2(size)) if size > 1 else 1.0
