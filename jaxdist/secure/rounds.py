"""The course of a round of secure aggregation between a server and its clients, as plain data.

A client sends requests. The server answers a request once all clients that have not left have sent
this request, and the request ARRIVED once the sum is closed:

    KEYS      the client's public keys        answer: the keys of all clients
    SHARES    its shares, by holder           answer: the shares for this client, by sender
    ARRIVED   nothing, after its vector       answer: the clients whose vectors are in the sum
    REVEAL    one share of each client        no answer: the sum is known

The server answers a repeated request again; a repetition changes nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping
from enum import IntEnum

import numpy as np

from jaxdist.secure.masks import SecureError
from jaxdist.secure.protocol import SEALED_BYTES, Keys, SecureClient, SecureSum
from jaxdist.secure.shamir import SHARE_BYTES

KEY_BYTES = 32
Parts = Mapping[int, bytes]
"""The data of a message: bytes by client."""
_CLIENT = struct.Struct("<Q")


class Stage(IntEnum):
    """The requests of a client in a round of secure aggregation, in order."""

    KEYS = 0
    SHARES = 1
    ARRIVED = 2
    REVEAL = 3


_SIZES = {
    Stage.KEYS: 2 * KEY_BYTES,
    Stage.SHARES: SEALED_BYTES,
    Stage.ARRIVED: 0,
    Stage.REVEAL: SHARE_BYTES,
}
"""The number of bytes for each client in the requests and answers of a stage."""


def to_bytes(parts: Parts) -> bytes:
    """Return the data of a message as bytes: the number of each client, then the client's bytes."""
    return b"".join(_CLIENT.pack(client) + part for client, part in parts.items())


def of_bytes(stage: int, raw: bytes) -> dict[int, bytes]:
    """Return the data of a message; the inverse of `to_bytes`.

    Raises:
      SecureError: the stage is unknown, or the number of bytes does not fit the stage.

    >>> of_bytes(Stage.ARRIVED, to_bytes({3: b"", 7: b""}))
    {3: b'', 7: b''}
    """
    size = _CLIENT.size + _SIZES[Stage(stage)] if stage in _SIZES else 0
    if not size or len(raw) % size:
        raise SecureError(
            f"secure aggregation: a message of {len(raw)} bytes is not valid in stage {stage}: "
            "install the same version of jaxdist on all hosts"
        )
    starts = range(0, len(raw), size)
    return {
        _CLIENT.unpack_from(raw, start)[0]: raw[start + _CLIENT.size : start + size]
        for start in starts
    }


class ClientRound:
    """A client's part of a round of secure aggregation.

    Args:
      client: the number of the client.
      needed: the number of clients that must complete the round.
    """

    def __init__(self, client: int, needed: int) -> None:
        self._number, self._client = client, SecureClient(client, needed)
        self._shares: Parts | None = None

    @property
    def ready(self) -> bool:
        """Whether the client has the other clients' shares, so that it can mask its vector."""
        return self._shares is not None

    def begin(self) -> tuple[Stage, Parts]:
        """Return the client's first request: its stage and its data."""
        keys = self._client.keys
        return Stage.KEYS, {self._number: keys.encryption + keys.mask}

    def masked(self, vector: np.ndarray) -> np.ndarray:
        """Return a vector of integers modulo 2^64, to which the client's masks are added.

        Raises:
          SecureError: the shares of another client were changed, or too few have arrived.
        """
        assert self._shares is not None
        return self._client.masked(vector, self._shares)

    def answered(self, stage: Stage, parts: Parts) -> tuple[Stage, Parts] | None:
        """Return the request that follows an answer, or None after the answer to `SHARES`.

        After that answer, the client masks its vector and sends it.

        Args:
          stage: the stage of the request that was answered.
          parts: the data of the answer, by client.

        Raises:
          SecureError: the answer does not belong to a round that protects this client's vector.
        """
        match stage:
            case Stage.KEYS:
                roster = {one: _keys(part) for one, part in parts.items()}
                return Stage.SHARES, self._client.shares(roster)
            case Stage.SHARES:
                self._shares = parts
                return None
            case Stage.ARRIVED:
                return Stage.REVEAL, self._client.reveal(parts.keys())
            case Stage.REVEAL:
                raise SecureError(
                    "secure aggregation: the server sent an answer where none was expected: "
                    "install the same version of jaxdist on all hosts"
                )


class ServerRound:
    """A server's part of a round of secure aggregation.

    Args:
      number: the number of the round.
      clients: the number of clients for which the run is planned.
      needed: the number of clients that must complete the round.
    """

    def __init__(self, number: int, clients: int, needed: int) -> None:
        self.number, self._clients, self._needed = number, clients, needed
        self._keys: dict[int, bytes] = {}
        self._shares: dict[int, Parts] = {}
        self._revealed: dict[int, Parts] = {}
        self._roster: frozenset[int] | None = None
        self._sharers: frozenset[int] | None = None
        self._arrived: frozenset[int] | None = None

    @property
    def begun(self) -> bool:
        """Whether the clients of the round are known, so that no other client can join."""
        return self._roster is not None

    @property
    def complete(self) -> bool:
        """Whether enough shares are revealed to unmask the sum."""
        return self._arrived is not None and len(self._revealed) >= self._needed

    def accepts(self, client: int) -> bool:
        """Return whether the sum may include a vector of the client."""
        return self._sharers is not None and client in self._sharers

    def take(self, client: int, stage: Stage, parts: Parts) -> None:
        """Store a client's request.

        A repeated request, or a request of a stage that has ended, has no effect.

        Raises:
          SecureError: the parts of the request do not belong to exactly the clients that the stage
            requires.
        """
        if stage is Stage.KEYS and self._roster is None:
            _check_clients(client, parts, {client})
            self._keys.setdefault(client, parts[client])
        elif stage is Stage.SHARES and self._sharers is None and client in (self._roster or ()):
            _check_clients(client, parts, self._roster)
            self._shares.setdefault(client, parts)
        elif stage is Stage.REVEAL and client in (self._arrived or ()):
            _check_clients(client, parts, self._sharers)
            self._revealed.setdefault(client, parts)

    def closed(self, arrived: Collection[int]) -> None:
        """Stop accepting vectors; the sum has only the vectors of the clients in `arrived`."""
        self._arrived = frozenset(arrived)

    def advance(self, members: Collection[int], pushed: Collection[int]) -> None:
        """Begin the next stage once all remaining members have made the request of this stage.

        The stage `KEYS` ends only if at least as many clients have sent keys as must complete the
        round. After the stage `SHARES`, the method only checks that enough clients are left.

        Args:
          members: the clients that have not left.
          pushed: the clients whose vectors wait for the sum.

        Raises:
          SecureError: too few clients are left to unmask the sum.
        """
        members = frozenset(members)
        if self._roster is None:
            # The round begins only when all members have sent their keys, so that a client that
            # replaces another client may still join.
            if len(self._keys.keys() & members) >= self._needed and members <= self._keys.keys():
                self._roster = members
            return
        if self._sharers is None:
            left = self._roster & members | self._shares.keys()
            if self._roster & members <= self._shares.keys():
                self._sharers = frozenset(self._shares)
        elif self._arrived is None:
            left = self._sharers & members | set(pushed)
        else:
            left = self._arrived & members | self._revealed.keys()
        if len(left) < self._needed:
            raise SecureError(
                f"secure aggregation: {len(left)} of {self._clients} clients are left in round "
                f"{self.number}, but {self._needed} are needed, so the sum of the round stays "
                "masked. Continue from the newest checkpoint with --resume, or allow more "
                "dropouts (strategy.aggregation.dropouts)"
            )

    def answer(self, client: int, stage: Stage) -> Parts | None:
        """Return the answer to a client's request, or None if there is no answer.

        There is no answer while other requests are missing, or if the client takes no part in the
        stage.
        """
        match stage:
            case Stage.KEYS if client in (self._roster or ()):
                assert self._roster is not None
                return {one: self._keys[one] for one in self._roster}
            case Stage.SHARES if client in (self._sharers or ()):
                return {sender: parts[client] for sender, parts in self._shares.items()}
            case Stage.ARRIVED if client in (self._arrived or ()):
                assert self._arrived is not None
                return dict.fromkeys(self._arrived, b"")
            case _:
                return None

    def total(self, vectors: Mapping[int, np.ndarray]) -> np.ndarray:
        """Return the sum of the vectors that arrived, modulo 2^64.

        Args:
          vectors: the masked vectors `[n]`, by client.

        Raises:
          SecureError: the shares contradict one another.
        """
        assert self._sharers is not None
        roster = {one: _keys(self._keys[one]) for one in self._sharers}
        summed = SecureSum(roster, self._needed, len(next(iter(vectors.values()))))
        for client, vector in vectors.items():
            summed.add(client, vector)
        return summed.total(self._revealed)


def _check_clients(client: int, parts: Parts, wanted: Collection[int] | None) -> None:
    if wanted is None or parts.keys() != set(wanted):
        told = ", ".join(map(str, parts)) or "none"
        raise SecureError(
            f"secure aggregation: client {client} sent data for clients {told}, which are not "
            "exactly the clients of its round: install the same version of jaxdist on all hosts"
        )


def _keys(raw: bytes) -> Keys:
    return Keys(raw[:KEY_BYTES], raw[KEY_BYTES:])
