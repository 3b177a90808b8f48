"""The virtual time of a simulation, and the network, whose messages take time."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from jaxdist.param_server.scenario import NetworkConfig

Action = Callable[[], None]
Node = tuple[str, int]
"""The kind and number of a participant, such as ("server", 0) or ("worker", 3)."""
HEADER_BYTES = 64
"""The bytes of every message besides its arrays."""
WINDOW_BYTES = 14_600
"""The bytes that a TCP connection sends before the first acknowledgement: ten segments (RFC
6928)."""


class EventQueue:
    """A queue of actions by virtual time; actions at equal times run in the order of planning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Action]] = []
        self._number = count()

    def after(self, seconds: float, action: Action) -> None:
        """Plan an action after this many seconds of virtual time."""
        heapq.heappush(self._planned, (self.now + seconds, next(self._number), action))

    def step(self, limit: float) -> bool:
        """Run the next action; return False if no action is left up to the time `limit`."""
        if not self._planned or self._planned[0][0] > limit:
            return False
        self.now, _, action = heapq.heappop(self._planned)
        action()
        return True


@dataclass(eq=False)
class _Flow:
    """A message on its way from one network card to another.

    Attributes:
      luck: the random factor by which the message's window is multiplied.
      ends: the time at which the last byte of the message leaves, if rates do not change.
    """

    source: Node
    target: Node
    size: int
    luck: float
    done: Action
    sent_bytes: float = 0.0
    rate: float = 0.0
    ends: float = float("inf")

    @property
    def ports(self) -> tuple[tuple[Node, str], ...]:
        return (self.source, "out"), (self.target, "in")

    @property
    def window_bytes(self) -> float:
        """The message's weight on a shared network card; the weight grows with the sent bytes."""
        return self.luck * (WINDOW_BYTES + self.sent_bytes)


@dataclass
class Network:
    """Network cards that messages share as TCP connections do.

    Messages that begin together get equal rates. The more bytes the earlier messages have
    already sent, the smaller is the rate of a message that begins later.

    Attributes:
      received_bytes: the number of bytes that each node has received, copies included.
      sent_bytes: the number of bytes that each node has sent, lost messages included.
      lost: the number of lost messages.
    """

    link: NetworkConfig
    timeline: EventQueue
    seed: int
    received_bytes: Counter[Node] = field(default_factory=Counter)
    sent_bytes: Counter[Node] = field(default_factory=Counter)
    lost: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(f"network {self.seed}")
        self._flows: list[_Flow] = []
        self._shared_at = 0.0
        self._plan = 0
        self._share_planned = False

    def send(
        self, source: Node, target: Node, payload_bytes: int, deliver: Action, lost: Action
    ) -> None:
        """Send a message from one node to another, beginning now.

        Args:
          deliver: the function that is called when the complete message has arrived. If the network
            duplicates the message, the function is called again.
          lost: the function that is called at once if the message is lost.
        """
        size, draws, link = HEADER_BYTES + payload_bytes, self._random, self.link
        self.sent_bytes[source] += size
        ways: list[float] = []
        if draws.random() < link.loss:
            self.lost += 1
            lost()  # The bytes of a lost message still take time on the network cards.
        else:
            for _ in range(2 if draws.random() < link.copies else 1):
                ways.append(link.latency_seconds + draws.random() * link.jitter_seconds)

        def arrive() -> None:
            self.received_bytes[target] += size
            deliver()

        def done() -> None:
            for way in ways:
                self.timeline.after(way, arrive)

        luck = draws.lognormvariate(0.0, link.unevenness)
        self._flows.append(_Flow(source, target, size, luck, done))
        self._share_soon()

    def _share_soon(self) -> None:
        """Plan a single call of `_share` for all messages that are sent at the same time."""
        if not self._share_planned:
            self._share_planned = True
            self.timeline.after(0.0, self._share)

    def _share(self) -> None:
        """Set the rate of each message from now on, and plan the next end of a message."""
        now = self.timeline.now
        for flow in self._flows:
            flow.sent_bytes += flow.rate * (now - self._shared_at)
        self._shared_at, self._share_planned = now, False
        flows = [(flow.window_bytes, flow.ports) for flow in self._flows]
        rates = fair_rates(flows, self._capacity)
        for flow, rate in zip(self._flows, rates, strict=True):
            flow.rate, flow.ends = rate, now + max(0.0, flow.size - flow.sent_bytes) / rate
        self._plan += 1
        if self._flows:
            plan, next_end = self._plan, min(flow.ends for flow in self._flows)
            # `_finish` receives the exact time of the end, since the timeline's time, now +
            # (next_end - now), may be rounded to an earlier time.
            self.timeline.after(next_end - now, lambda: self._finish(plan, next_end))

    def _finish(self, plan: int, end: float) -> None:
        if plan != self._plan:
            return  # The rates have changed since the end was planned.
        done = [flow for flow in self._flows if flow.ends <= end]
        self._flows = [flow for flow in self._flows if flow.ends > end]
        for flow in done:
            flow.done()
        self._share_soon()

    def _capacity(self, port: tuple[Node, str]) -> float:
        (kind, _), _ = port
        link = self.link
        return link.server_bytes_per_second if kind == "server" else link.bytes_per_second


def fair_rates(
    flows: Sequence[tuple[float, Sequence[Hashable]]], capacity: Callable[[Any], float]
) -> list[float]:
    """Return the rate of each flow by max-min fairness.

    In the result, a flow can get a higher rate per weight only if a flow with an equal or lower
    rate per weight gets less. The rates are found by progressive filling (Bertsekas and Gallager,
    Data Networks, 6.5.2).

    Args:
      flows: the weight of each flow, and the ports that it passes.
      capacity: the function from a port to its capacity, in the unit of the rates.

    >>> capacity = {"a": 9, "b": 4, "s": 6, "t": 9}
    >>> flows = [(1, ("a", "s")), (1, ("b", "s")), (1, ("b", "t"))]
    >>> fair_rates(flows, capacity.__getitem__)
    [4.0, 2.0, 2.0]
    """
    rates = [0.0] * len(flows)
    left: dict[Hashable, float] = {}
    sharing: dict[Hashable, dict[int, float]] = {}
    for at, (weight, ports) in enumerate(flows):
        for port in ports:
            if port not in left:
                left[port], sharing[port] = float(capacity(port)), {}
            sharing[port][at] = weight
    units = {port: left[port] / sum(found.values()) for port, found in sharing.items()}
    while units:
        full = min(units, key=units.__getitem__)
        unit = units[full]
        changed: set[Hashable] = set()
        for at, weight in list(sharing[full].items()):
            rates[at] = weight * unit
            for port in flows[at][1]:
                left[port] -= rates[at]
                del sharing[port][at]
                changed.add(port)
        for port in changed:
            if sharing[port]:
                # Rounding may leave a capacity slightly below zero, which counts as zero.
                units[port] = max(0.0, left[port]) / sum(sharing[port].values())
            else:
                del units[port]
    return rates
