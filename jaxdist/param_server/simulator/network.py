"""Virtual time, and messages that take it."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from jaxdist.param_server.simulator.config import Link

Action = Callable[[], None]
Node = tuple[str, int]
"""("server", 0), ("worker", 3)."""
HEADER_BYTES = 64
"""Of every message, beside its arrays."""


class Timeline:
    """What happens when; at one time, in the order that it was planned in."""

    def __init__(self) -> None:
        self.now = 0.0
        self._planned: list[tuple[float, int, Action]] = []
        self._number = count()

    def after(self, seconds: float, action: Action) -> None:
        """Plan something."""
        heapq.heappush(self._planned, (self.now + seconds, next(self._number), action))

    def step(self, limit: float) -> bool:
        """Do the next thing; False where nothing is left before `limit`."""
        if not self._planned or self._planned[0][0] > limit:
            return False
        self.now, _, action = heapq.heappop(self._planned)
        action()
        return True


@dataclass
class Network:
    """Cards with a queue each way: a message leaves after those before it, and so it comes in.

    Attributes:
      received_bytes: by node, copies included.
      sent_bytes: by node, what is lost included.
    """

    link: Link
    timeline: Timeline
    seed: int
    received_bytes: Counter[Node] = field(default_factory=Counter)
    sent_bytes: Counter[Node] = field(default_factory=Counter)
    lost: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(f"network {self.seed}")
        self._out_free: dict[Node, float] = {}
        self._in_free: dict[Node, float] = {}

    def send(
        self, source: Node, target: Node, payload_bytes: int, deliver: Action, lost: Action
    ) -> None:
        """Send a message now.

        Args:
          deliver: called when all of it has come in; twice for a copy.
          lost: called when it is lost, at once.
        """
        size, now = HEADER_BYTES + payload_bytes, self.timeline.now
        begin = max(now, self._out_free.get(source, 0.0))
        self._out_free[source] = end = begin + size / self._rate(source)
        self.sent_bytes[source] += size
        draws = self._random
        if draws.random() < self.link.loss:
            self.lost += 1
            lost()
            return
        for _ in range(2 if draws.random() < self.link.copies else 1):
            way = self.link.latency_seconds + draws.random() * self.link.jitter_seconds
            self.timeline.after(
                begin + way - now, lambda way=way: self._arrive(target, size, end + way, deliver)
            )

    def _arrive(self, target: Node, size: int, last_byte: float, deliver: Action) -> None:
        begin = max(self.timeline.now, self._in_free.get(target, 0.0))
        done = max(begin + size / self._rate(target), last_byte)
        self._in_free[target] = done
        self.received_bytes[target] += size
        self.timeline.after(done - self.timeline.now, deliver)

    def _rate(self, node: Node) -> float:
        link = self.link
        return link.server_bytes_per_second if node[0] == "server" else link.bytes_per_second
