"""The prediction of the time of a collective by the alpha-beta model, without devices.

A call takes the latencies of its chain of `steps` messages, and the time of its bytes on the
busiest link (Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
in MPICH", 2005). Concurrent computation and other traffic on the links are ignored.
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
    """The size and the link of a mesh axis, for a prediction of time.

    Attributes:
      size: the number of devices on the axis.
      link: the link that joins these devices.
    """

    size: int
    link: Link


def predict_seconds(
    algorithm: Algorithm, kind: Operation, payload_bytes: float, levels: Sequence[Level]
) -> float:
    """Predict the time of a collective, in seconds.

    Each phase of `Hierarchical` runs on the links of its axes. All other algorithms treat all
    devices alike, so all of their steps and bytes are assumed to use the slowest link.

    Args:
      algorithm: any algorithm except `Auto`, which only chooses another algorithm.
      kind: the name of the operation, such as "all_reduce".
      payload_bytes: the bytes of the whole tensor on one device, as in `Algorithm.traffic`.
      levels: the size and link of each axis of the call. The axis across the slowest network comes
        first.

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
    """Predict the time of XLA's collective, whose algorithm is unknown.

    The prediction is the time of the faster of `Ring` and `Halving`. In shared memory, XLA's
    devices read the arrays of other devices directly. The prediction is then the time of a single
    message with the whole payload.
    """
    if slowest(levels).topology == "memory" and math.prod(level.size for level in levels) > 1:
        return _seconds(Xla(), Traffic(1, payload_bytes, payload_bytes, 1), levels)
    flat = (Ring(directions=2), Halving())
    return min(predict_seconds(algorithm, kind, payload_bytes, levels) for algorithm in flat)


def slowest(levels: Sequence[Level]) -> Link:
    """Return a link with the least bandwidth and the largest latency of all axes.

    Axes with one device do not count, unless all axes have one device.
    """
    links = [level.link for level in levels if level.size > 1] or [level.link for level in levels]
    narrowest = min(links, key=lambda link: link.bytes_per_second)
    return replace(narrowest, latency_seconds=max(link.latency_seconds for link in links))


def _seconds(algorithm: Algorithm, traffic: Traffic, levels: Sequence[Level]) -> float:
    link = slowest(levels)
    busiest_bytes = max(traffic.serial_bytes, traffic.sent_bytes / link.ports)
    seconds = traffic.steps * link.latency_seconds + busiest_bytes / link.bytes_per_second
    # A ring sends only to neighbors, and XLA's cost is assumed to be the cost of a ring. On a
    # torus, the messages of other algorithms pass through the devices in between, and use several
    # links.
    if link.topology != "torus" or isinstance(algorithm, Ring | Xla):
        return seconds
    return seconds * _mean_hops(math.prod(level.size for level in levels))


def _mean_hops(size: int) -> float:
    """Return the mean number of links that a message uses on a ring, in a logarithmic algorithm.

    The steps of such an algorithm send messages over 1, 2, 4, ... links.
    """
    return (size - 1) / math.ceil(math.log2(size)) if size > 1 else 1.0
