"""The codec without compression, for some of the parameters or for the first steps of a run."""

from __future__ import annotations

from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxdist.compression.contract import CodecState, Factored, Factors, LinearCodec, Round
from jaxdist.types import Leaf


class WholeCodec(LinearCodec):
    """A codec that sends every element as float32."""

    type: Literal["whole"] = "whole"
    """The name that selects this codec in a config."""

    lossless: ClassVar[bool] = True

    def factors(self, x: jax.Array, state: CodecState, round: Round) -> Factors:
        own = x.astype(jnp.float32)
        return Factored((own,), ((yield own),), state)

    def expand(self, factors: tuple[jax.Array, ...], like: Leaf, round: Round) -> jax.Array:
        return factors[0].reshape(like.shape)
