"""Secure aggregation: the sum to the bit of pushes that look like noise, with dropouts."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from jaxdist.errors import ConfigError
from jaxdist.secure.masks import SecureError, add_mask, decode, encode
from jaxdist.secure.protocol import SecureClient, SecureSum, threshold
from jaxdist.secure.shamir import recover_secret, share_secret

pytest.importorskip("cryptography", reason="the extra secure is not installed")
LENGTH = 50_000


def vectors(clients, length=LENGTH):
    return [np.random.default_rng(n).normal(size=length).astype(np.float32) for n in range(clients)]


class Round:
    """A round of clients, of which some share no keys, some send no vector, some reveal nothing."""

    def __init__(self, clients, dropouts, *, numbers=None, length=LENGTH):
        needed = threshold(clients, dropouts)
        numbers = numbers or range(clients)
        self.clients = {n: SecureClient(n, needed) for n in numbers}
        roster = {n: one.keys for n, one in self.clients.items()}
        shares = {n: one.shares(roster) for n, one in self.clients.items()}
        self.to = {n: {other: one[n] for other, one in shares.items()} for n in numbers}
        self.server = SecureSum(roster, needed, length)

    def push(self, number, vector):
        found = self.clients[number].masked(vector, self.to[number])
        self.server.add(number, found)
        return found

    def total(self, silent=()):
        arrived = self.server.arrived
        reveals = {n: self.clients[n].reveal(arrived) for n in arrived if n not in silent}
        return self.server.total(reveals)


@pytest.mark.parametrize(
    ("gone", "silent"), [((), ()), ((0,), ()), ((3, 6), ()), ((), (1, 5)), ((2,), (4,))]
)
def test_the_sum_is_the_plain_sum_to_the_bit(gone, silent):
    """Of those whose vectors arrived, whether others went before or after."""
    encoded = [encode(one, 7, weight=3.0) for one in vectors(7)]
    found = Round(7, 2)
    for number in set(range(7)) - set(gone):
        found.push(number, encoded[number])
    plain = sum(encoded[n] for n in range(7) if n not in gone)
    total = found.total(silent)
    assert total.tobytes() == plain.tobytes()
    wanted = sum(3.0 * vectors(7)[n].astype(np.float64) for n in range(7) if n not in gone)
    np.testing.assert_allclose(decode(total), wanted, rtol=0, atol=7 * 2.0**-33)


def test_one_dropout_too_many_is_refused():
    encoded = [encode(one, 7) for one in vectors(7, 10)]
    late, silent = Round(7, 2, length=10), Round(7, 2, length=10)
    for number in range(4):
        late.push(number, encoded[number])
    with pytest.raises(SecureError, match="4 clients have sent their vectors, but 5 are needed"):
        late.total()
    for number in range(5):
        silent.push(number, encoded[number])
    with pytest.raises(SecureError, match="4 clients have revealed their shares, but 5 are"):
        silent.total(silent=(0,))
    few = Round(7, 2, length=10)
    with pytest.raises(SecureError, match="4 clients are on the roster of the round"):
        few.clients[0].shares({n: few.server.roster[n] for n in range(4)})
    with pytest.raises(SecureError, match="4 clients have shared their keys"):
        few.clients[0].masked(encoded[0], {n: few.to[0][n] for n in range(4)})


def spread(words):
    """Chi-square of the bytes, of 255 degrees of freedom, in standard deviations from its mean."""
    counts = np.bincount(words.view(np.uint8), minlength=256)
    expected = counts.sum() / 256
    return (((counts - expected) ** 2 / expected).sum() - 255) / np.sqrt(2 * 255)


def test_a_single_push_is_uniformly_distributed():
    """Of a constant, whose own bytes are far from it; also minus one of the two kinds of masks."""
    constant = encode(np.ones(LENGTH, np.float32), 3)
    found = Round(3, 1)
    pushed = found.push(0, constant)
    own = pushed.copy()
    add_mask(own, found.clients[0]._own, subtract=True)
    again = Round(3, 1).push(0, constant)
    assert spread(constant) > 1e4
    for words in (pushed, own, pushed - constant, pushed - again):
        assert abs(spread(words)) < 8
        assert abs(np.corrcoef(words[:-1] / 2**64, words[1:] / 2**64)[0, 1]) < 8 / LENGTH**0.5


def test_a_vector_that_arrives_late_stays_masked():
    found = Round(3, 1, length=10)
    for number in (0, 1):
        found.push(number, encode(np.ones(10), 3))
    found.total()
    with pytest.raises(SecureError, match="asked for shares of other clients before"):
        found.clients[0].reveal({0, 1, 2})


def test_what_was_changed_on_its_way_is_refused():
    found = Round(3, 1, length=4)
    vector = encode(np.ones(4), 3)
    torn = bytes([found.to[0][1][0] ^ 1]) + found.to[0][1][1:]
    with pytest.raises(SecureError, match="the shares of client 1 were changed"):
        found.clients[0].masked(vector, {**found.to[0], 1: torn})
    with pytest.raises(SecureError, match="has already sent a vector"):
        found.server.add(9, vector)
    found = Round(3, 1, length=4)
    for number in (0, 1, 2):
        found.push(number, vector)
    with pytest.raises(SecureError, match="has sent its vector of this round before"):
        found.clients[0].masked(vector, found.to[0])
    reveals = {n: dict(found.clients[n].reveal({0, 1, 2})) for n in range(3)}
    reveals[0][2] = reveals[0][1]
    with pytest.raises(SecureError, match="the shares of client 2 contradict one another"):
        found.server.total(reveals)
    del reveals[0][2], reveals[1][2]
    with pytest.raises(SecureError, match="1 clients have revealed a share of client 2"):
        found.server.total(reveals)
    roster = dict(found.server.roster)
    other = SecureClient(0, 2)
    with pytest.raises(SecureError, match="has other keys for this client"):
        other.shares(roster)
    with pytest.raises(SecureError, match="two clients of the roster have the same key"):
        found.clients[0].shares({**roster, 2: roster[1]})


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**31 / 3])
def test_what_would_wrap_around_is_refused(value):
    with pytest.raises(SecureError, match=r"3 clients needs magnitudes below 7\.16e"):
        encode(np.array([0.0, value]), 3)


@pytest.mark.parametrize(("clients", "dropouts"), [(1, 0), (2, 1), (4, 2), (9, 5)])
def test_too_many_dropouts_are_refused(clients, dropouts):
    with pytest.raises(ConfigError, match=f"allow at most {max(0, (clients - 1) // 2)} dropouts"):
        threshold(clients, dropouts)


def test_fewer_shares_than_the_threshold_recover_nothing():
    secret = bytes(range(32))
    shares = share_secret(secret, range(9), 5)
    assert recover_secret(dict([*shares.items()][4:])) == secret
    assert recover_secret(dict([*shares.items()][5:])) is None


def test_the_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(SecureError, match=r"pip install 'jaxdist\[secure\]'"):
        SecureClient(0, 2)
