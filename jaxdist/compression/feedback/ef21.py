"""The feedback EF21, whose messages are changes of an estimate of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from jaxdist.compression.contract import Codec
from jaxdist.compression.feedback.contract import Feedback, Memory, View
from jaxdist.types import Leaf


class Ef21(Feedback):
    """The feedback EF21 (Richtárik et al., arXiv 2106.05203, algorithm 2).

    Sender i and its receivers keep an estimate g_i of the gradient. With the codec C, each round
    computes g_i += C(gradient_i - g_i). Each estimate equals, bit for bit, the sum of the decoded
    messages of all rounds. The optimizer gets the sum of all estimates. With gradients that already
    have momentum, the method is EF21-SGDM (arXiv 2305.15155). If sums are encoded again, their
    messages use EF21 too, as in the method for both directions (EF21-BC, arXiv 2110.03294).

    Memory: 4 bytes for each element of the estimate, and 4 bytes for each element of the sum.
    """

    type: Literal["ef21"] = "ef21"
    """The name that selects this feedback in a config."""

    def init(self, like: Leaf, codecs: Sequence[Codec]) -> Memory:
        return {"estimate": jnp.zeros(like.shape, jnp.float32)}

    def view(self, like: Leaf) -> View:
        return {"estimate": jnp.zeros(like.shape, jnp.float32)}

    def correct(self, gradient: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        return gradient.astype(jnp.float32) - memory["estimate"], memory

    def settle(self, x: jax.Array, decoded: jax.Array, memory: Memory) -> Memory:
        return {"estimate": memory["estimate"] + decoded}

    def receive(self, decoded: jax.Array, view: View) -> tuple[jax.Array, View]:
        estimate = view["estimate"] + decoded
        return estimate, {"estimate": estimate}
