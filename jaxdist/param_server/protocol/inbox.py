"""Each message of a client once, and in its order, however the network delivers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxdist.param_server.protocol.messages import Acknowledge, Message, Refuse

WINDOW = 64
"""Messages that a client may have under way; outcomes of as many are kept for its retries."""


@dataclass(frozen=True)
class Inbox:
    """What is known of one client's messages.

    Attributes:
      expected: the sequence of its next message; all before it have been delivered.
      early: later ones, which wait for those before them.
      outcomes: of the last pushes that were settled, what the client was told.
    """

    expected: int = 0
    early: Mapping[int, Message] = field(default_factory=dict)
    outcomes: Mapping[int, Acknowledge | Refuse] = field(default_factory=dict)

    def accepts(self, sequence: int) -> bool:
        """Is it within the window?"""
        return sequence < self.expected + WINDOW

    def put(self, message: Message) -> tuple[Inbox, tuple[Message, ...]]:
        """With a message, and those that are ready now, in order; of two alike, the first.

        >>> from jaxdist.param_server.protocol.messages import Pull, Stamp
        >>> inbox, ready = Inbox().put(Pull(Stamp(0, 7, 1)))
        >>> inbox, ready = inbox.put(Pull(Stamp(0, 7, 0)))
        >>> [message.stamp.sequence for message in ready], inbox.expected
        ([0, 1], 2)
        """
        sequence = message.stamp.sequence
        if sequence < self.expected:
            return self, ()
        early = {sequence: message, **self.early}
        ready, expected = [], self.expected
        while expected in early:
            ready.append(early.pop(expected))
            expected += 1
        return replace(self, expected=expected, early=early), tuple(ready)

    def settled(self, outcome: Acknowledge | Refuse) -> Inbox:
        """With what the client was told; what it can no longer ask for is forgotten."""
        outcomes = {**self.outcomes, outcome.sequence: outcome}
        kept = {number: one for number, one in outcomes.items() if number >= self.expected - WINDOW}
        return replace(self, outcomes=kept)
