"""Pushes in few bytes over a wire: what a worker's codec makes of a shard, and back."""

from __future__ import annotations

import math
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.compression import Codec, Feedback, Sender, SenderState, Sent, first_round
from jaxdist.param_server.live.layout import Layout, Piece
from jaxdist.param_server.wire.contract import Spec
from jaxdist.types import PyTree


class Codes:
    """How pushes of a shard are written: the messages of its ranges end to end, as bytes.

    Args:
      whole: parameters that are pushed as they are.
      seed: of codecs that draw at random.
    """

    def __init__(
        self, layout: Layout, codec: Codec, feedback: Feedback, whole: frozenset[str], seed: int
    ) -> None:
        self.layout, self.whole, self.seed = layout, whole, seed
        self.sender = Sender(codec, feedback)
        self.encode = jax.jit(self.sender.encode)
        self._decode = jax.jit(codec.decode, static_argnums=1)
        self._messages = [self._message(piece) for piece in layout.pieces]

    @cached_property
    def spec(self) -> Spec:
        """Of a push."""
        size = sum(_bytes(leaf) for one in self._messages for leaf in jax.tree.leaves(one))
        return Spec(self.layout.server, np.dtype(np.uint8), size)

    def _message(self, piece: Piece) -> PyTree:
        """The shapes of what stands for a range."""
        if piece.range.name in self.whole:
            return jax.ShapeDtypeStruct(piece.shape, self.layout.dtype)
        x = like(piece)
        found = jax.eval_shape(
            self.sender.encode, x, jax.eval_shape(self.sender.init, x), first_round()
        )
        return found.message

    def decode(self, payload: np.ndarray, client: int, sequence: int) -> np.ndarray:
        """What a push stands for, as the shard lies.

        Args:
          payload: of `spec`; any bytes stand for something.
        """
        flat = np.empty(self.layout.length, self.layout.dtype)
        round, offset = first_round(self.seed, sequence, client), 0
        for at, (piece, message) in enumerate(zip(self.layout.pieces, self._messages, strict=True)):
            leaves: list[np.ndarray] = []
            for leaf in jax.tree.leaves(message):
                raw = payload[offset : offset + _bytes(leaf)]
                leaves.append(raw.copy().view(leaf.dtype).reshape(leaf.shape))
                offset += _bytes(leaf)
            found: PyTree = jax.tree.unflatten(jax.tree.structure(message), leaves)
            if piece.range.name not in self.whole:
                found = self._decode(found, like(piece), round.part(at))
            flat[piece.slice] = np.asarray(found).reshape(-1)
        return flat


class Encoder:
    """The encoder of one worker, which keeps what its messages to a server left out."""

    def __init__(self, codes: Codes, client: int) -> None:
        self.codes, self.client = codes, client
        self._states: dict[int, SenderState] = {}

    def __call__(self, change: np.ndarray, sequence: int) -> tuple[np.ndarray, bool]:
        """A push, and whether it is finite; one that is not leaves nothing behind for the next.

        Args:
          change: as the shard lies.
          sequence: of its message.
        """
        codes = self.codes
        round = first_round(codes.seed, sequence, self.client)
        parts: list[np.ndarray] = []
        finite = True
        for at, piece in enumerate(codes.layout.pieces):
            x = change[piece.slice].reshape(piece.shape)
            if piece.range.name in codes.whole:
                parts.append(np.ascontiguousarray(x))
                finite &= bool(np.isfinite(x).all())
                continue
            state = self._states.get(at)
            if state is None:
                state = codes.sender.init(like(piece))
            sent: Sent = codes.encode(x.astype(np.float32), state, round.part(at))
            self._states[at] = sent.state
            finite &= bool(sent.finite)
            parts += [np.asarray(leaf) for leaf in jax.tree.leaves(sent.message)]
        raw = [np.ascontiguousarray(part).reshape(-1).view(np.uint8) for part in parts]
        return np.concatenate(raw), finite


def like(piece: Piece) -> jax.ShapeDtypeStruct:
    """What codecs encode of a range."""
    return jax.ShapeDtypeStruct(piece.shape, jnp.float32)


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
