"""The encoding of a shard's changes as bytes, for compressed pushes, and the decoding."""

from __future__ import annotations

import math
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.compression import Codec, EncodedGradient, Feedback, Sender, SenderState, first_round
from jaxdist.compression.sender import states_after_push
from jaxdist.param_server.live.layout import ShardLayout, ShardPiece
from jaxdist.types import PyTree
from jaxdist.wire.contract import Spec


class Codes:
    """The encoding of a shard's pushes: the encoded ranges of the shard, one after another.

    Args:
      layout: the ranges of the shard.
      codec: the codec of ranges.
      feedback: the error feedback of clients.
      whole: the names of parameters that are pushed uncompressed.
      seed: the seed of random codecs.
    """

    def __init__(
        self,
        layout: ShardLayout,
        codec: Codec,
        feedback: Feedback,
        whole: frozenset[str],
        seed: int,
    ) -> None:
        self.layout, self.whole, self.seed = layout, whole, seed
        self.sender = Sender(codec, feedback)
        self.encode = jax.jit(self.sender.encode)
        self._decode = jax.jit(codec.decode, static_argnums=1)
        self._messages = [self._message(piece) for piece in layout.pieces]

    @cached_property
    def spec(self) -> Spec:
        """The required shard, dtype and length of a push."""
        size = sum(_bytes(leaf) for one in self._messages for leaf in jax.tree.leaves(one))
        return Spec(self.layout.server, np.dtype(np.uint8), size)

    def _message(self, piece: ShardPiece) -> PyTree:
        """Return the shapes and dtypes of the arrays that encode a range."""
        if piece.range.name in self.whole:
            return jax.ShapeDtypeStruct(piece.shape, self.layout.dtype)
        x = like(piece)
        found = jax.eval_shape(
            self.sender.encode, x, jax.eval_shape(self.sender.init, x), first_round()
        )
        return found.message

    def decode(self, payload: np.ndarray, client: int, sequence: int) -> np.ndarray:
        """Decode a push to a flat array in the order of the shard.

        Args:
          payload: the encoded push. Any bytes of the length in `spec` can be decoded.
          client: the client that sent the push.
          sequence: the number of the push among the client's messages to the server.
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


class PushEncoder:
    """A client's encoder for one server, with the residuals of error feedback."""

    def __init__(self, codes: Codes, client: int) -> None:
        self.codes, self.client = codes, client
        self._states: dict[int, SenderState] = {}

    def __call__(self, change: np.ndarray, sequence: int) -> tuple[np.ndarray, bool]:
        """Return the encoded push, and whether all values of the change are finite.

        A push with a value that is not finite is dropped as a whole, and changes no residual.

        Args:
          change: the change as a flat array, in the order of the shard.
          sequence: the sequence of the push's message.
        """
        found, finite = self._parts(change, sequence)
        leaves = jax.tree.leaves([x if sent is None else sent.message for x, sent in found])
        raw = [np.ascontiguousarray(leaf).reshape(-1).view(np.uint8) for leaf in leaves]
        return np.concatenate(raw), finite

    def decoded(self, change: np.ndarray, sequence: int) -> tuple[np.ndarray, bool]:
        """Return the push as the server decodes it, and whether all values are finite.

        The arguments and the effect on the residuals are the same as for a call.
        """
        found, finite = self._parts(change, sequence)
        flat = np.empty_like(change)
        for piece, (x, sent) in zip(self.codes.layout.pieces, found, strict=True):
            flat[piece.slice] = np.asarray(x if sent is None else sent.decoded).reshape(-1)
        return flat, finite

    def _parts(
        self, change: np.ndarray, sequence: int
    ) -> tuple[list[tuple[np.ndarray, EncodedGradient | None]], bool]:
        """Return each range's values, their encoding or None, and whether all values are finite."""
        codes = self.codes
        round = first_round(codes.seed, sequence, self.client)
        found: list[tuple[np.ndarray, EncodedGradient | None]] = []
        finite, sent = True, dict[int, EncodedGradient]()
        for at, piece in enumerate(codes.layout.pieces):
            x = change[piece.slice].reshape(piece.shape)
            if piece.range.name in codes.whole:
                finite &= bool(np.isfinite(x).all())
            else:
                if at not in self._states:
                    self._states[at] = codes.sender.init(like(piece))
                sent[at] = codes.encode(x.astype(np.float32), self._states[at], round.part(at))
                finite &= bool(sent[at].finite)
            found.append((x, sent.get(at)))
        self._states |= states_after_push(self._states, sent, finite=finite)
        return found, finite


def like(piece: ShardPiece) -> jax.ShapeDtypeStruct:
    """Return the shape of a range, and the dtype in which codecs encode the range, float32."""
    return jax.ShapeDtypeStruct(piece.shape, jnp.float32)


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
