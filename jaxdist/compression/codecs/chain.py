"""A chain of two codecs, of which the first selects elements and the second encodes them."""

from __future__ import annotations

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from pydantic import Field

from jaxdist.compression.codecs.adaptive import Adaptive
from jaxdist.compression.codecs.cast import Cast
from jaxdist.compression.codecs.quantize import Quantize
from jaxdist.compression.codecs.randomk import RandomK
from jaxdist.compression.codecs.sign import Sign
from jaxdist.compression.codecs.topk import TopK
from jaxdist.compression.contract import Codec, CodecState, Exchange, Message, Round, Selector
from jaxdist.types import Leaf

First = Annotated[TopK | RandomK, Field(discriminator="type")]
Then = Annotated[Cast | Quantize | Adaptive | Sign, Field(discriminator="type")]


class Chain(Codec):
    """A codec that selects elements by the codec `first` and encodes them by the codec `then`."""

    type: Literal["chain"] = "chain"
    """The name that selects this codec in a config."""
    first: First
    """The codec that selects the elements to send: topk or randomk."""
    then: Then
    """The codec that encodes the selected elements: cast, quantize, adaptive or sign."""

    @property  # `Codec` has a class variable, but a chain's exchange depends on `first`.
    def exchange(self) -> Exchange:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The exchange of the messages, which is never "sum", since codes cannot be added."""
        return "gather" if self.first.exchange == "gather" else "scatter"

    @property
    def exact(self) -> bool:
        return self.first.exact and self.then.exact

    @property
    def unbiased(self) -> bool:
        return self.first.unbiased and self.then.unbiased

    @property
    def contractive(self) -> bool:
        return self.first.contractive

    def check(self, like: Leaf, name: str = "") -> None:
        self.first.check(like, name)

    def encode(self, x: jax.Array, state: CodecState, round: Round) -> tuple[Message, CodecState]:
        where, values = self._first.select(x, round)
        codes, _ = self.then.encode(values, (), round)
        return {"where": where, "values": codes}, state

    def decode(self, message: Message, like: Leaf, round: Round) -> jax.Array:
        values = self.then.decode(message["values"], self._values(like, round), round)
        return self._first.place(message["where"], values, like, round)

    @property
    def _first(self) -> Selector:
        return self.first

    def _values(self, like: Leaf, round: Round) -> Leaf:
        x = jax.ShapeDtypeStruct(like.shape, jnp.float32)
        return jax.eval_shape(lambda x: self._first.select(x, round)[1], x)
