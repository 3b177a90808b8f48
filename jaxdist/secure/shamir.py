"""Shamir's secret sharing of 32 bytes, over the integers modulo a prime.

The scheme is from Shamir, "How to share a secret" (Communications of the ACM 22, 1979). A secret is
the value at 0 of a random polynomial of degree threshold - 1, and the share of holder h is the
value of the polynomial at h + 1. Any `threshold` shares determine the secret. Fewer shares have the
same uniform distribution for every secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

PRIME = 2**521 - 1
SECRET_BYTES, SHARE_BYTES = 32, 66


def share_secret(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, bytes]:
    """Split a secret among holders; any `threshold` of the shares recover the secret.

    >>> secret = bytes(range(32))
    >>> recover_secret(dict(list(share_secret(secret, range(5), 3).items())[2:])) == secret
    True
    """
    assert len(secret) == SECRET_BYTES
    assert 1 <= threshold <= len(holders)
    rest = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients = [*rest, int.from_bytes(secret, "big")]
    found: dict[int, bytes] = {}
    for holder in holders:
        value = 0
        for coefficient in coefficients:
            value = (value * (holder + 1) + coefficient) % PRIME
        found[holder] = value.to_bytes(SHARE_BYTES, "big")
    return found


def recover_secret(shares: Mapping[int, bytes]) -> bytes | None:
    """Return the secret that shares by holder determine, or None if they determine no secret.

    All given shares are used, and at least as many as the threshold are needed. For fewer shares,
    or shares of different secrets, the result is None except with a negligible probability.
    """
    points = {holder + 1: int.from_bytes(one, "big") for holder, one in shares.items()}
    total = 0
    for x, y in points.items():
        above = below = 1
        for other in points:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        total += y * above * pow(below, -1, PRIME)
    found = total % PRIME
    return found.to_bytes(SECRET_BYTES, "big") if found < 2 ** (8 * SECRET_BYTES) else None
