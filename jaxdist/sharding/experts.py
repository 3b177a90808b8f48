"""The exchange of tokens between devices that have different experts.

An exchange is a function of this device's tokens, of the experts of each token, and of the weights
of these experts. An exchange returns, for each token, the weighted sum of the experts' results, and
runs inside a `jax.shard_map` that is manual on the axis of the experts. `Padded` and `Ragged` send
a token once to each device that has at least one of the token's experts.

Dims: X devices along the axis, T tokens of a device, D embed, k experts of a token. M is the
maximum number of tokens that a device sends to another device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.permute import collected, spread

ExchangeName = Literal["auto", "padded", "ring", "ragged"]
"""The name of an exchange of tokens, or `auto`."""
Local = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""A function that computes the experts of this device, from tokens `[T, D]`, the indices of the
tokens' experts `[T, k]` and weights `[T, k]` to the weighted sums `[T, D]`. The experts of this
device are counted from 0. An index that is larger than the last of them means an expert on another
device, which adds nothing to the sum."""
Transfer = Callable[[jax.Array], jax.Array]
"""A function from the rows that a device sends to the rows that it receives."""


@dataclass(frozen=True)
class Place:
    """The axes and sizes of an exchange, from which a device finds its experts.

    Attributes:
      axes: the manual mesh axes that split the experts.
      experts: the number of experts of each device.
      most: the maximum number of tokens that a device sends to another device, M.
    """

    axes: tuple[str, ...]
    experts: int
    most: int

    @property
    def size(self) -> int:
        """The number of devices that exchange tokens, X."""
        return lax.axis_size(self.axes)

    @property
    def axis(self) -> Any:
        """The axes in the form for `ragged_all_to_all`: a name, or a tuple of several names."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    def own(self, ids_Tk: jax.Array) -> jax.Array:
        """Convert indices of experts in the model to indices of experts on this device.

        The experts of this device get the indices from 0 to `experts` - 1. The experts of all other
        devices get the index `experts`.
        """
        mine = ids_Tk - lax.axis_index(self.axes) * self.experts
        return jnp.where((mine >= 0) & (mine < self.experts), mine, self.experts)


class TokenExchange(Protocol):
    """The protocol of exchanges, which send tokens to their experts and send the results back."""

    def __call__(
        self, place: Place, local: Local, x_TD: jax.Array, ids_Tk: jax.Array, weights_Tk: jax.Array
    ) -> jax.Array:
        """Return the weighted sum of the results of each token's experts, `[T, D]`.

        Args:
          place: the settings of the exchange.
          local: the function that computes the experts of this device.
          x_TD: the tokens of this device.
          ids_Tk: the indices of each token's experts in the model.
          weights_Tk: the weights of each token's experts.
        """
        ...

    def tokens_sent(self, tokens: int, most: int, devices: int, top_k: int) -> float:
        """Return the number of tokens, of D features each, that a device sends in a forward pass.

        Args:
          tokens: the number of tokens of a device, T.
          most: the maximum number of tokens that a device sends to another device, M.
          devices: the number of devices that exchange tokens, X.
          top_k: the number of experts of a token, k.
        """
        ...


class RingExchange:
    """The exchange by an all-gather of all tokens and a reduce-scatter of the results."""

    def __call__(
        self, place: Place, local: Local, x_TD: jax.Array, ids_Tk: jax.Array, weights_Tk: jax.Array
    ) -> jax.Array:
        """Exchange tokens as `TokenExchange` does; each device gets the tokens of all devices."""

        def gathered(x: jax.Array) -> jax.Array:
            return lax.all_gather(x, place.axes, tiled=True)

        given = gathered(x_TD), place.own(gathered(ids_Tk)), gathered(weights_Tk)
        return lax.psum_scatter(local(*given), place.axes, tiled=True)

    def tokens_sent(self, tokens: int, most: int, devices: int, top_k: int) -> float:
        """Return the number of sent tokens, as `TokenExchange.tokens_sent` does.

        All tokens are sent to each of the other devices, and as many results come back.
        """
        return 2.0 * (devices - 1) * tokens


class Padded:
    """The exchange by all-to-alls of buffers that have M rows for each device."""

    def __call__(
        self, place: Place, local: Local, x_TD: jax.Array, ids_Tk: jax.Array, weights_Tk: jax.Array
    ) -> jax.Array:
        """Exchange tokens as `TokenExchange` does, by the transfers that `transfers` returns."""
        sent = _Sent.plan(place, ids_Tk)
        there, back = self.transfers(place, sent.counts)

        def exchanged(x: jax.Array) -> jax.Array:
            return there(spread(x, sent.tokens, sent.places))

        # In the buffers, experts are counted from 1, because a row without a token has the number
        # 0.
        ids = exchanged((ids_Tk + 1).astype(jnp.int32)) - 1
        ids = place.own(jnp.where(ids < 0, place.size * place.experts, ids))
        y_RD = local(exchanged(x_TD), ids, exchanged(weights_Tk))
        return collected(back(y_RD), sent.places, sent.tokens)

    def transfers(self, place: Place, counts: jax.Array) -> tuple[Transfer, Transfer]:
        """Return the transfer of buffers to the devices with the experts, and the transfer back.

        Args:
          place: the axes and sizes of the exchange.
          counts: the number of tokens that this device sends to each device, `[X]`.
        """
        del counts

        def moved(x: jax.Array) -> jax.Array:
            return lax.all_to_all(x, place.axes, 0, 0, tiled=True)

        return moved, moved

    def tokens_sent(self, tokens: int, most: int, devices: int, top_k: int) -> float:
        """Return the number of sent tokens, as `TokenExchange.tokens_sent` does.

        `most` rows are sent to each of the other devices, and as many results come back.
        """
        return 2.0 * (devices - 1) * most


class Ragged(Padded):
    """The exchange by ragged all-to-alls, which send only rows with tokens.

    XLA does not support ragged all-to-alls on CPUs.
    """

    def transfers(self, place: Place, counts: jax.Array) -> tuple[Transfer, Transfer]:
        """Return both transfers as ragged all-to-alls; see `Padded.transfers` for the arguments."""
        X, M = place.size, place.most
        received = lax.all_to_all(counts, place.axes, 0, 0, tiled=True)
        # Each sender has M fixed rows in a receiver's buffer, so it knows the offset of its rows
        # without communication.
        starts = jnp.arange(X, dtype=jnp.int32) * M
        here = jnp.full(X, lax.axis_index(place.axis), jnp.int32) * M

        def moved(sizes: jax.Array, back: jax.Array, x: jax.Array) -> jax.Array:
            into = jnp.zeros((X * M, *x.shape[1:]), x.dtype)
            return lax.ragged_all_to_all(x, into, starts, sizes, here, back, axis_name=place.axis)

        return partial(moved, counts, received), partial(moved, received, counts)

    def tokens_sent(self, tokens: int, most: int, devices: int, top_k: int) -> float:
        """Return the expected number of sent tokens if each token's experts are drawn uniformly.

        The number is 2 (X - 1) T (1 - (1 - 1/X)^k), but at most 2 (X - 1) M;
        `TokenExchange.tokens_sent` defines the letters.
        """
        return 2.0 * (devices - 1) * min(most, tokens * (1 - (1 - 1 / devices) ** top_k))


@dataclass(frozen=True)
class _Sent:
    """The tokens that this device sends, and their rows in the send buffer.

    The send buffer has M rows for each of the X devices. This device has T tokens.

    Attributes:
      tokens: the index of the token in each row of the buffer, `[X M]`, or T for an empty row.
      places: for each token and each device, the row of the buffer from which the token is sent to
        the device, `[T, X]`, or X M if the token is not sent to the device.
      counts: the number of tokens for each device, `[X]`.
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
    """Return `name`, or for "auto" the name of the exchange that sends the fewest tokens.

    If the numbers of tokens are equal, "ring" is chosen, because it needs no buffers.

    Args:
      name: the name of an exchange, or "auto".
      tokens, most, devices, top_k: the arguments of `TokenExchange.tokens_sent`.
      platform: the platform of the devices. For "auto", "ragged" is chosen on TPUs only. XLA does
        not support ragged all-to-alls on CPUs, and on GPUs they wait for the host.

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
    """Return the maximum number of tokens that a device can send to another device.

    Args:
      tokens: the number of tokens of a device.
      rows: the number of sequences of a device.
      capacity: the maximum number of tokens of a sequence for each expert, or None without a limit.
      experts: the number of experts of a device.
    """
    return tokens if capacity is None else min(tokens, rows * capacity * experts)
