"""The exchange of tokens between devices with different experts, and its choice by formula.

Each alternative maps the tokens of this device, their experts and weights to the weighted sums of
the experts' results, inside a `jax.shard_map` that is manual on the axis of the experts. A device
sends a token once to each device that has some of its experts.

Dims: X devices along the axis, T tokens of a device, M tokens that a device sends to another at
most, D embed, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.permute import collected, spread

ExchangeName = Literal["auto", "padded", "ring", "ragged"]
"""Way to exchange tokens between devices with different experts."""
Local = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""Function of tokens `[T, D]`, numbers of this device's experts `[T, k]` and weights `[T, k]`; a
number beyond these is an expert elsewhere. It returns sums `[T, D]`."""


@dataclass(frozen=True)
class Place:
    """The place of a device among the devices that have different experts.

    Attributes:
      axes: mesh axes of these devices; all are manual.
      experts: number of experts of each device.
      most: the largest number of tokens that a device sends to another.
    """

    axes: tuple[str, ...]
    experts: int
    most: int

    @property
    def size(self) -> int:
        """The number of devices that exchange tokens."""
        return lax.axis_size(self.axes)

    @property
    def axis(self) -> Any:
        """The axes as `ragged_all_to_all` takes them: a single axis by its name."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    def own(self, ids_Tk: jax.Array) -> jax.Array:
        """Renumber experts so that this device's begin at 0, and others come after them."""
        mine = ids_Tk - lax.axis_index(self.axes) * self.experts
        return jnp.where((mine >= 0) & (mine < self.experts), mine, self.experts)


class TokenExchange(Protocol):
    """A method to send tokens to their experts, and the results back."""

    def __call__(
        self, place: Place, local: Local, x_TD: jax.Array, ids_Tk: jax.Array, weights_Tk: jax.Array
    ) -> jax.Array:
        """Return the weighted sums of the results of each token's experts, `[T, D]`."""
        ...

    def tokens_sent(self, tokens: int, most: int, devices: int, top_k: int) -> float:
        """Return how many tokens a device sends in the forward pass, of D features each."""
        ...


class RingExchange:
    """All-gather of all tokens, and reduce-scatter of the results."""

    def __call__(
        self, place: Place, local: Local, x_TD: jax.Array, ids_Tk: jax.Array, weights_Tk: jax.Array
    ) -> jax.Array:
        """Exchange; each device computes its experts for the tokens of all devices."""

        def gathered(x: jax.Array) -> jax.Array:
            return lax.all_gather(x, place.axes, tiled=True)

        given = gathered(x_TD), place.own(gathered(ids_Tk)), gathered(weights_Tk)
        return lax.psum_scatter(local(*given), place.axes, tiled=True)

    def tokens_sent(self, tokens: int, most: int, devices: int, top_k: int) -> float:
        """Return the numbers sent: 2 (X - 1) T, since all tokens travel to all devices and back."""
        return 2.0 * (devices - 1) * tokens


class Padded:
    """All-to-all of buffers that have room for all the tokens that a device may send to another."""

    def __call__(
        self, place: Place, local: Local, x_TD: jax.Array, ids_Tk: jax.Array, weights_Tk: jax.Array
    ) -> jax.Array:
        """Exchange by two all-to-alls of `[X, M, D]`."""
        sent = _Sent.plan(place, ids_Tk)
        count = place.size * place.experts

        def exchanged(x: jax.Array) -> jax.Array:
            buffer = spread(x, sent.tokens, sent.places)
            return lax.all_to_all(buffer, place.axes, 0, 0, tiled=True)

        # Experts are numbered from 1 on the way, since rows without a token are zeros.
        ids = exchanged((ids_Tk + 1).astype(jnp.int32)) - 1
        ids = place.own(jnp.where(ids < 0, count, ids))
        y_RD = local(exchanged(x_TD), ids, exchanged(weights_Tk))
        y_RD = lax.all_to_all(y_RD, place.axes, 0, 0, tiled=True)
        return collected(y_RD, sent.places, sent.tokens)

    def tokens_sent(self, tokens: int, most: int, devices: int, top_k: int) -> float:
        """Return 2 (X - 1) M."""
        return 2.0 * (devices - 1) * most


class Ragged:
    """All-to-all of exactly the tokens that a device sends to another; not on CPU."""

    def __call__(
        self, place: Place, local: Local, x_TD: jax.Array, ids_Tk: jax.Array, weights_Tk: jax.Array
    ) -> jax.Array:
        """Exchange by `jax.lax.ragged_all_to_all`, into a buffer for the worst case."""
        sent = _Sent.plan(place, ids_Tk)
        X, M = place.size, place.most
        count = X * place.experts
        received = lax.all_to_all(sent.counts, place.axes, 0, 0, tiled=True)
        # Each sender has a part of the buffer of its own, so that its offset is known to it.
        starts = jnp.arange(X, dtype=jnp.int32) * M
        here = jnp.full(X, lax.axis_index(place.axis), jnp.int32) * M

        def moved(x: jax.Array, sizes: jax.Array, back: jax.Array) -> jax.Array:
            into = jnp.zeros((X * M, *x.shape[1:]), x.dtype)
            return lax.ragged_all_to_all(x, into, starts, sizes, here, back, axis_name=place.axis)

        def exchanged(x: jax.Array) -> jax.Array:
            return moved(spread(x, sent.tokens, sent.places), sent.counts, received)

        ids = exchanged((ids_Tk + 1).astype(jnp.int32)) - 1
        ids = place.own(jnp.where(ids < 0, count, ids))
        y_RD = local(exchanged(x_TD), ids, exchanged(weights_Tk))
        return collected(moved(y_RD, received, sent.counts), sent.places, sent.tokens)

    def tokens_sent(self, tokens: int, most: int, devices: int, top_k: int) -> float:
        """Return the expectation with an even load: 2 (X - 1) T (1 - (1 - 1/X)^k)."""
        return 2.0 * (devices - 1) * min(most, tokens * (1 - (1 - 1 / devices) ** top_k))


@dataclass(frozen=True)
class _Sent:
    """The tokens that this device sends.

    Attributes:
      tokens: the token of each of the X M places of the buffer, `[X M]`; T for none.
      places: the place of each token in the buffer of each device, `[T, X]`; X M for none.
      counts: number of tokens for each device.
    """

    tokens: jax.Array
    places: jax.Array
    counts: jax.Array

    @classmethod
    def plan(cls, place: Place, ids_Tk: jax.Array) -> _Sent:
        tokens, X, M = len(ids_Tk), place.size, place.most
        devices_Tk1 = (ids_Tk // place.experts)[..., None]
        goes_TX = (devices_Tk1 == jnp.arange(X).reshape(1, 1, X)).any(1)
        before_TX = jnp.cumsum(goes_TX, 0) - goes_TX
        first_1X = (jnp.arange(X, dtype=jnp.int32) * M)[None]
        places_TX = jnp.where(goes_TX, first_1X + before_TX, X * M).astype(jnp.int32)
        number_TX = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[:, None], (tokens, X))
        empty = jnp.full(X * M, tokens, jnp.int32)
        tokens_R = empty.at[places_TX].set(number_TX, mode="drop")
        return cls(tokens_R, places_TX, goes_TX.sum(0).astype(jnp.int32))


EXCHANGES: Mapping[ExchangeName, TokenExchange] = {
    "padded": Padded(),
    "ring": RingExchange(),
    "ragged": Ragged(),
}


def choose_exchange(
    name: ExchangeName, tokens: int, most: int, devices: int, top_k: int, platform: str
) -> ExchangeName:
    """Choose the exchange that sends the fewest tokens; a ring, which has no buffers, if equal.

    Args:
      tokens, most: T and M.
      platform: platform of the devices; `ragged` is only chosen for TPUs, since XLA lacks it on
        CPU, and on GPU it waits for the host.

    >>> choose_exchange("auto", 1024, 1024, 4, 2, "cpu"), choose_exchange(
    ...     "auto", 1024, 640, 4, 2, "cpu"
    ... )
    ('ring', 'padded')
    """
    if name != "auto":
        return name
    known: list[ExchangeName] = ["ring", "padded"]
    if platform == "tpu":
        known.append("ragged")
    return min(known, key=lambda one: EXCHANGES[one].tokens_sent(tokens, most, devices, top_k))


def most_sent(tokens: int, rows: int, capacity: int | None, experts: int) -> int:
    """Return the largest number of tokens that a device can send to another.

    Args:
      rows: number of sequences of a device.
      capacity: the largest number of tokens of a sequence for an expert; None sets no limit.
      experts: number of experts of a device.
    """
    return tokens if capacity is None else min(tokens, rows * capacity * experts)
