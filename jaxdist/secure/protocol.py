"""The protocol of a round of secure aggregation, for the clients and the server.

The protocol is from section 4 of Bonawitz et al., "Practical secure aggregation for federated
learning on user-held data" (arXiv 1611.04482). The protocol protects the vectors from a server that
follows the protocol, but examines everything that it receives. Every round has new keys.

1. Each client u sends two public keys (`SecureClient.keys`), and the server sends the roster of all
   keys to every client.
2. Client u splits two secrets into shares for the clients of the roster: the private key of its
   pairwise masks, and the key b_u of its individual mask. Each share is encrypted for its holder
   (`shares`).
3. Client u sends its vector plus both kinds of masks (`masked`), modulo 2^64:
   y = x + PRG(b_u) + sum over v of PRG(s_uv), with the sign of u - v. The pairwise masks cancel in
   the sum of all clients.
4. The server announces the clients whose vectors have arrived. For each client v, every client
   reveals one of its two shares (`reveal`): the share of b_v if the vector of v has arrived, and
   otherwise the share of the private key of v. No client reveals both shares of the same client, so
   a vector that arrives late stays masked.

With n clients and at most d dropouts, n - d clients must complete the round. The shares of
n - d clients recover a secret. Fewer shares do not.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from jaxdist.errors import ConfigError
from jaxdist.secure.masks import SecureError, add_mask, agreed_key, check_installed
from jaxdist.secure.shamir import SHARE_BYTES, recover_secret, share_secret

SEALED_BYTES = 2 * SHARE_BYTES + 16
"""The size of a client's encrypted shares for one holder, in bytes: two shares, and a tag."""


@dataclass(frozen=True)
class Keys:
    """A client's public keys of a round: for encryption between clients, and for masks."""

    encryption: bytes
    mask: bytes


def threshold(clients: int, dropouts: int) -> int:
    """Return the number of clients that must complete a round.

    Raises:
      ConfigError: the number is below 2, so that a sum would reveal a vector; or the number is less
        than a majority, so that a server could ask two groups of clients for the two secrets of a
        client.

    >>> threshold(10, 3)
    7
    """
    needed = clients - dropouts
    if needed < 2 or 2 * needed <= clients:
        most = max(0, (clients - 1) // 2)
        raise ConfigError(
            f"secure aggregation of {clients} clients with {dropouts} dropouts: at least 2 "
            "clients, and more than half of all clients, must complete a round. Use 2 or more "
            f"clients, and allow at most {most} dropouts"
        )
    return needed


class SecureClient:
    """A client in one round of secure aggregation.

    Args:
      number: the number of the client.
      threshold: the number of clients that must complete the round.

    Raises:
      SecureError: the package cryptography is not installed.
    """

    def __init__(self, number: int, threshold: int) -> None:
        check_installed()
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self.number, self.threshold = number, threshold
        self._encryption, self._mask = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._own = os.urandom(32)
        self._roster: Mapping[int, Keys] = {}
        self._received: dict[int, bytes] = {}
        self._revealed: tuple[frozenset[int], frozenset[int]] | None = None

    @property
    def keys(self) -> Keys:
        """The public keys of this client, for the roster."""
        private = self._encryption, self._mask
        return Keys(*(one.public_key().public_bytes_raw() for one in private))

    def shares(self, roster: Mapping[int, Keys]) -> dict[int, bytes]:
        """Return this client's encrypted shares, by the client that holds them.

        Raises:
          SecureError: the roster is too small, lacks this client or its keys, or has two clients
            with the same key.
        """
        _check_enough(roster, self.threshold, "are on the roster of the round")
        if roster.get(self.number) != self.keys:
            raise SecureError(
                f"the roster lacks client {self.number}, or has other keys for this client than "
                "the client sent: end the run, and check the server and its network"
            )
        if len({one.mask for one in roster.values()}) < len(roster):
            raise SecureError(
                "two clients of the roster have the same key, so the key of one client is "
                "forged: end the run, and check its clients"
            )
        self._roster = dict(roster)
        of_key = share_secret(self._mask.private_bytes_raw(), [*roster], self.threshold)
        of_own = share_secret(self._own, [*roster], self.threshold)
        return {
            holder: self._cipher(holder, self.number, of_key[holder] + of_own[holder], True)
            for holder in roster
        }

    def masked(self, vector: np.ndarray, received: Mapping[int, bytes]) -> np.ndarray:
        """Return a vector plus its masks.

        To anyone without the keys of the masks, the result looks like uniformly random integers.

        Args:
          vector: a vector of integers modulo 2^64 `[n]`, as `jaxdist.secure.masks.encode` returns
            it.
          received: the encrypted shares for this client, by sender. Pairwise masks are added for
            these senders only, because the secrets of other clients could not be recovered.

        Raises:
          SecureError: the shares of too few clients have arrived, shares were changed, or the
            method was called before.
        """
        _check_enough(received, self.threshold, "have shared their keys")
        if self._received:
            raise SecureError(
                f"client {self.number} has sent its vector of this round before: "
                "create a new client for each round"
            )
        self._received = {
            sender: self._cipher(self.number, sender, sealed, False)
            for sender, sealed in received.items()
        }
        found = vector.copy()
        add_mask(found, self._own)
        for other in received:
            if other != self.number:
                key = agreed_key(self._mask, self._roster[other].mask, "mask")
                add_mask(found, key, subtract=self.number < other)
        return found

    def reveal(self, arrived: Collection[int]) -> dict[int, bytes]:
        """Return, for each client that has shared its keys, this client's share of one secret.

        If the vector of a client has arrived, the secret is the key of its individual mask.
        Otherwise, the secret is the client's private key of the pairwise masks.

        Args:
          arrived: the clients whose vectors the server has.

        Raises:
          SecureError: the server has too few vectors, or an earlier call had other arrived clients.
        """
        asked = frozenset(arrived), frozenset(self._received) - frozenset(arrived)
        _check_enough(asked[0], self.threshold, "have sent their vectors")
        if self._revealed not in (None, asked):
            raise SecureError(
                f"client {self.number} was asked for shares of other clients before: with both "
                "shares of a client, the server could read the client's vector. End the run, "
                "and check the server"
            )
        self._revealed = asked
        return {
            sender: both[SHARE_BYTES:] if sender in asked[0] else both[:SHARE_BYTES]
            for sender, both in self._received.items()
        }

    def _cipher(self, holder: int, sender: int, text: bytes, seals: bool) -> bytes:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        other = holder if seals else sender
        key = agreed_key(self._encryption, self._roster[other].encryption, "shares")
        # Two clients encrypt messages in both directions with the same key, so the nonces must
        # differ.
        nonce, cipher = struct.pack(">QI", sender, 0), AESGCM(key)
        if seals:
            return cipher.encrypt(nonce, text, None)
        try:
            return cipher.decrypt(nonce, text, None)
        except InvalidTag as error:
            raise SecureError(
                f"the shares of client {sender} were changed in transit: check "
                "the server and its network, and repeat the round"
            ) from error


class SecureSum:
    """The server's part of one round, which adds masked vectors and removes the masks of the sum.

    Args:
      roster: the public keys of the clients that have shared their keys.
      threshold: the number of clients that must complete the round.
      length: the number of elements of the vectors.

    Attributes:
      arrived: the clients whose vectors have been added.
    """

    def __init__(self, roster: Mapping[int, Keys], threshold: int, length: int) -> None:
        self.roster, self.threshold = dict(roster), threshold
        self.arrived: set[int] = set()
        self._total = np.zeros(length, np.uint64)

    def add(self, client: int, masked: np.ndarray) -> None:
        """Add a client's masked vector to the sum.

        Raises:
          SecureError: the client is not on the roster, or has sent a vector before.
        """
        if client not in self.roster or client in self.arrived:
            raise SecureError(
                f"client {client} is not on the roster, or has already sent a "
                "vector: add one vector for each client of the roster"
            )
        self.arrived.add(client)
        self._total += masked

    def total(self, revealed: Mapping[int, Mapping[int, bytes]]) -> np.ndarray:
        """Return the sum of the vectors that arrived, modulo 2^64.

        Args:
          revealed: the answers of `SecureClient.reveal` to `arrived`, by client.

        Raises:
          SecureError: too few clients answered, or their shares do not determine the secrets.
        """
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        _check_enough(revealed, self.threshold, "have revealed their shares")
        found = self._total.copy()
        for client in self.roster:
            secret = recover_secret(dict(_shares_of(client, revealed, self.threshold)))
            if secret is None:
                raise SecureError(
                    f"the shares of client {client} contradict one another: some "
                    "client sent a wrong share; repeat the round without that client"
                )
            if client in self.arrived:
                add_mask(found, secret, subtract=True)
                continue
            private = X25519PrivateKey.from_private_bytes(secret)
            for other in self.arrived:
                key = agreed_key(private, self.roster[other].mask, "mask")
                # Of two clients, the client with the smaller number subtracted the mask and the
                # client with the larger number added it.
                add_mask(found, key, subtract=other > client)
        return found


def _shares_of(
    client: int, revealed: Mapping[int, Mapping[int, bytes]], threshold: int
) -> Iterable[tuple[int, bytes]]:
    holders = sorted(holder for holder, one in revealed.items() if client in one)
    _check_enough(holders, threshold, f"have revealed a share of client {client}")
    return ((holder, revealed[holder][client]) for holder in holders[:threshold])


def _check_enough(clients: Collection[int], threshold: int, what: str) -> None:
    if len(clients) < threshold:
        raise SecureError(
            f"secure aggregation: {len(clients)} clients {what}, but {threshold} are needed, so "
            "the sum of the round stays masked: repeat the round with more clients, or allow more "
            "dropouts"
        )
