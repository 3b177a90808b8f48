"""The delivery of each message of a client once and in order, over an unreliable network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxdist.param_server.protocol.messages import Acknowledge, Message, Refuse

WINDOW = 64
"""The largest number of messages that a client may have pending, which is also the number of
outcomes that are kept for the client's retries."""


@dataclass(frozen=True)
class Inbox:
    """The messages of one client that wait, and the replies to its pushes.

    Attributes:
      expected: the sequence of the client's next message; all earlier messages have been delivered.
      early: the later messages, which wait for the messages before them.
      outcomes: the replies to the client's last settled pushes.
    """

    expected: int = 0
    early: Mapping[int, Message] = field(default_factory=dict)
    outcomes: Mapping[int, Acknowledge | Refuse] = field(default_factory=dict)

    def accepts(self, sequence: int) -> bool:
        """Return whether a message's sequence is below `expected` plus `WINDOW`."""
        return sequence < self.expected + WINDOW

    def put(self, message: Message) -> tuple[Inbox, tuple[Message, ...]]:
        """Return the inbox with a message added, and the messages that are now ready, in order.

        A duplicate is ignored.

        >>> from jaxdist.param_server.protocol.messages import Pull, Stamp
        >>> inbox, ready = Inbox().put(Pull(Stamp(0, 7, 1)))
        >>> inbox, ready = inbox.put(Pull(Stamp(0, 7, 0)))
        >>> [message.stamp.sequence for message in ready], inbox.expected
        ([0, 1], 2)
        """
        sequence = message.stamp.sequence
        if sequence < self.expected:
            return self, ()
        early = {sequence: message, **self.early}  # The first copy of a message is kept.
        return replace(self, early=early)._ready(self.expected)

    def settled_before(self, sequence: int) -> tuple[Inbox, tuple[Message, ...]]:
        """Return the inbox, which no longer waits for messages before a sequence.

        The second result is the messages that are now ready, in order.

        At the start of each session, a client names its oldest message without a final reply. A
        server that has taken over cannot know of earlier pulls, because pulls are not replicated.
        """
        if sequence <= self.expected:
            return self, ()
        early = {number: one for number, one in self.early.items() if number >= sequence}
        return replace(self, early=early)._ready(sequence)

    def _ready(self, expected: int) -> tuple[Inbox, tuple[Message, ...]]:
        early, ready = dict(self.early), []
        while expected in early:
            ready.append(early.pop(expected))
            expected += 1
        return replace(self, expected=expected, early=early), tuple(ready)

    def settled(self, outcome: Acknowledge | Refuse) -> Inbox:
        """Return the inbox with the reply to a push, without replies that are no longer needed.

        The client can no longer ask for a reply that is more than `WINDOW` messages old.
        """
        outcomes = {**self.outcomes, outcome.sequence: outcome}
        kept = {number: one for number, one in outcomes.items() if number >= self.expected - WINDOW}
        return replace(self, outcomes=kept)
