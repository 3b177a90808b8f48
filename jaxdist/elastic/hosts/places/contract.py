"""What hosts meet at: one token that is swapped, and small values that are whole or not there.

The token is the only thing that two hosts may want to change at once; everything else has one
writer. An alternative is a place that all hosts see: a folder, a Redis server.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace
from typing import Protocol

from jaxdist.errors import RunError
from jaxdist.types import Json

NOBODY = "nobody"


class RendezvousError(RunError):
    """The rendezvous cannot be reached, or is not fit to be one."""


class LostError(RendezvousError):
    """The rendezvous was emptied, and will never again be the one that hosts met at."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"the rendezvous {address} has lost its content: end all agents and begin them again "
            "with --resume"
        )


@dataclass(frozen=True)
class Token:
    """Who keeps the registry.

    Attributes:
      name: of the rendezvous, drawn when it was made: one that lost its content has another.
      term: greater with each keeper.
      holder: the host that keeps it; NOBODY between two.
      beat: greater with each turn of the keeper.
    """

    name: str
    term: int = 0
    holder: str = NOBODY
    beat: int = 0

    def __str__(self) -> str:
        return f"{self.name}.{self.term}.{self.holder}.{self.beat}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """What `str` made.

        >>> Token.parse("ab.3.node1-77.12")
        Token(name='ab', term=3, holder='node1-77', beat=12)

        Raises:
          RendezvousError: it is something else.
        """
        parts = text.split(".")
        if len(parts) != 4 or not (parts[1].isdigit() and parts[3].isdigit()):
            raise RendezvousError(f"{text!r} is no token of a rendezvous: choose an empty place")
        return cls(parts[0], int(parts[1]), parts[2], int(parts[3]))

    def taken(self, holder: str) -> Token:
        """The next keeper's."""
        return replace(self, term=self.term + 1, holder=holder, beat=0)

    def next(self) -> Token:
        """The same keeper's, a turn later."""
        return replace(self, beat=self.beat + 1)


class Rendezvous(Protocol):
    """A place that all hosts see; may be called from several threads.

    Names of values are `kind/name`. Each method raises `RendezvousError` where the place cannot be
    reached, in a bounded time.
    """

    address: str

    def token(self) -> str:
        """The token as it is now."""
        ...

    def secret(self) -> bytes:
        """A secret that only those share who may use the place, for hosts without a token file."""
        ...

    def compare_and_swap(self, seen: str, new: str) -> bool:
        """Put a token in the place of another; False, and nothing done, where it is not `seen`.

        Linearizable: of all swaps that begin with one token, one succeeds, and what a host reads
        after its swap was there before it or is newer.
        """
        ...

    def put(self, name: str, value: Json) -> None:
        """Write a value; who reads sees the old one or the new one, whole."""
        ...

    def get(self, name: str) -> Json:
        """A value; None where there is none."""
        ...

    def names(self, kind: str) -> list[str]:
        """Names of all values of a kind, without it, sorted."""
        ...

    def drop(self, name: str) -> None:
        """Remove a value, if it is there."""
        ...


def is_loopback(address: str) -> bool:
    """Return whether an address, IPv4 or IPv6, leads to this machine alone; False for a name.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("node1")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
