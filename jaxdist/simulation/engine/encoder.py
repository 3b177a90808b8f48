"""The encoder of pushes, with error feedback, and the values that a server decodes from pushes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import jax
import numpy as np

from jaxdist.compression import Codec, EncodedGradient, Feedback, Sender, SenderState, first_round
from jaxdist.compression.sender import states_after_push
from jaxdist.param_server.placement.ranges import Range
from jaxdist.simulation.engine.shard import Shard


class Encoding:
    """The encoding that all clients of a run share, compiled once.

    Attributes:
      whole: the names of parameters that are pushed without encoding.
      seed: the seed of codecs that draw at random.
    """

    def __init__(
        self, codec: Codec, feedback: Feedback, whole: frozenset[str] = frozenset(), seed: int = 0
    ) -> None:
        self.whole, self.seed = whole, seed
        self.sender = Sender(codec, feedback)

    @cached_property
    def encode(self) -> jax.stages.Wrapped:
        return jax.jit(self.sender.encode)

    def size_bytes(self, ranges: Sequence[Range], arrays: Shard) -> int:
        """Return the number of bytes of a push of these ranges."""
        return sum(
            array.nbytes if one.name in self.whole else self.sender.codec.wire_bytes(_like(array))
            for one, array in zip(ranges, arrays, strict=True)
        )


class ClientEncoder:
    """The encoder of a client, with the residuals that error feedback keeps for each server."""

    def __init__(self, encoding: Encoding, client: int) -> None:
        self.encoding, self.client = encoding, client
        self._states: dict[tuple[int, int], SenderState] = {}

    def __call__(
        self, server: int, ranges: Sequence[Range], change: Shard, sequence: int
    ) -> tuple[Shard, bool]:
        """Return the push as the server decodes it, and whether it is finite.

        A push with a value that is not finite is dropped as a whole, and changes no residual.

        Args:
          sequence: the number of the push among the client's messages to the server.
        """
        encoding = self.encoding
        round = first_round(encoding.seed, sequence, self.client)
        found: list[np.ndarray] = []
        finite, sent = True, dict[tuple[int, int], EncodedGradient]()
        for at, (one, array) in enumerate(zip(ranges, change, strict=True)):
            if one.name in encoding.whole:
                found.append(array)
                finite &= bool(np.isfinite(array).all())
                continue
            key = server, at
            if key not in self._states:
                self._states[key] = encoding.sender.init(_like(array))
            x = array.astype(np.float32)
            sent[key] = encoding.encode(x, self._states[key], round.part(at))
            finite &= bool(sent[key].finite)
            found.append(np.asarray(sent[key].decoded).astype(array.dtype))
        self._states |= states_after_push(self._states, sent, finite=finite)
        return tuple(found), finite


def _like(array: np.ndarray) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, np.float32)
