"""The contract of a rendezvous: a token with compare-and-swap, and values with atomic writes.

Several hosts may change the token at once; every other value has one writer at a time. A rendezvous
is a folder, a Redis server or an etcd cluster that all hosts can access.
"""

from __future__ import annotations

import ipaddress
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxdist.errors import RunError
from jaxdist.types import Json

NOBODY = "nobody"


class RendezvousError(RunError):
    """The error for a rendezvous that cannot be reached, or that is unsuitable."""


class LostError(RendezvousError):
    """The error for a rendezvous that lost its content, after which the hosts cannot continue."""

    def __init__(self, address: str) -> None:
        super().__init__(
            f"the rendezvous {address} has lost its content: stop all agents, and start them again "
            "with --resume"
        )


@dataclass(frozen=True)
class Token:
    """The token, which shows which host is the leader.

    Attributes:
      name: the name of the rendezvous, which is drawn at random when the rendezvous is created. A
        rendezvous that was recreated has a new name.
      term: the number of the term, which grows with each leader.
      holder: the name of the leader, or `NOBODY` between two terms.
      beat: the number of the leader's turn within the term.
    """

    name: str
    term: int = 0
    holder: str = NOBODY
    beat: int = 0

    def __str__(self) -> str:
        return f"{self.name}.{self.term}.{self.holder}.{self.beat}"

    @classmethod
    def parse(cls, text: str) -> Token:
        """Return the token that a text contains.

        >>> Token.parse("ab.3.node1-77.12")
        Token(name='ab', term=3, holder='node1-77', beat=12)

        Raises:
          RendezvousError: the text is not a token.
        """
        parts = text.split(".")
        if len(parts) != 4 or not (parts[1].isdigit() and parts[3].isdigit()):
            raise RendezvousError(
                f"{text!r} is not the token of a rendezvous: choose an empty rendezvous"
            )
        return cls(parts[0], int(parts[1]), parts[2], int(parts[3]))

    def taken(self, holder: str) -> Token:
        """Return the first token of the next term, whose leader is `holder`."""
        return replace(self, term=self.term + 1, holder=holder, beat=0)

    def next(self) -> Token:
        """Return the token of the next turn of the same leader."""
        return replace(self, beat=self.beat + 1)


class Rendezvous(ABC):
    """A small shared store that all hosts can access; several threads may call its methods.

    A value's full name is `kind/name`. If the store cannot be reached, each method raises
    `RendezvousError` within a bounded time.
    """

    address: str

    @abstractmethod
    def token(self) -> str:
        """Return the token of the rendezvous, which names the leader."""

    def secret(self) -> bytes:
        """Return a secret that only users of the store can read, for hosts without a token file.

        The default is the name of the rendezvous, which is a secret if only clients of a server can
        read the name.
        """
        return Token.parse(self.token()).name.encode()

    @abstractmethod
    def compare_and_swap(self, seen: str, new: str) -> bool:
        """Replace the token by `new` if the token is `seen`; return whether the token was replaced.

        The operation is linearizable. If several hosts expect the same token, the swap of one host
        succeeds. A host that reads a value after its swap sees every write that came before the
        swap.

        Args:
          seen: the token that the caller expects.
          new: the token that replaces it.
        """

    @abstractmethod
    def put(self, name: str, value: Json) -> None:
        """Write a value atomically: a reader gets either the old value or the new value."""

    @abstractmethod
    def get(self, name: str) -> Json:
        """Return the value with the given name, or None if there is no such value."""

    @abstractmethod
    def names(self, kind: str) -> list[str]:
        """Return the sorted names of all values of a kind, without the kind."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Delete the value with the given name, if it exists."""

    def values(self, kind: str) -> Iterator[tuple[str, Any]]:
        """Yield the name of each value of a kind, without the kind, and the value."""
        for name in self.names(kind):
            value = self.get(f"{kind}/{name}")
            if value is not None:
                yield name, value

    def drop_before(self, kind: str, number: int) -> None:
        """Delete all values of a kind whose names are numbers below `number`."""
        for name in self.names(kind):
            if int(name) < number:
                self.drop(f"{kind}/{name}")


def is_loopback(address: str) -> bool:
    """Return whether an address, IPv4 or IPv6, is a loopback address; a name is never loopback.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("node1")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False
