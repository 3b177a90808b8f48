"""The dense feed-forward layer of a transformer: SwiGLU and its variants.

Dims: B batch, L sequence, D embed, F mlp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, Protocol

import jax
from flax import nnx

from jaxdist.hlo.source.marks import gives, takes
from jaxdist.models.fences import Pass, fence
from jaxdist.models.hints import RESIDUAL, WITHIN, Hint, SequenceRing
from jaxdist.models.layers import biased, matmul, param
from jaxdist.models.remat import named

Mlp = Literal["swiglu", "geglu", "gelu", "gelu_erf"]
GATED = ("swiglu", "geglu")
"""The types of MLP whose hidden values are the product of a gate and an up projection."""
ACTIVATIONS: Mapping[Mlp, Callable[[jax.Array], jax.Array]] = {
    "swiglu": jax.nn.silu,
    "geglu": jax.nn.gelu,
    "gelu": jax.nn.gelu,
    "gelu_erf": partial(jax.nn.gelu, approximate=False),
}


class MlpSettings(Protocol):
    """The settings of a transformer that its feed-forward layers read; see `GptConfig`."""

    @property
    def embed(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def mlp_width(self) -> int: ...
    @property
    def mlp_type(self) -> Mlp: ...
    @property
    def biases(self) -> str: ...


class SwiGLU(nnx.Module):
    """The layer down(silu(gate x) * up x) (Shazeer 2020, arXiv 2002.05202), or a variant.

    `mlp_type` selects the variant: geglu has gelu instead of silu, and gelu and gelu_erf are
    down(gelu(up x)), without a gate.
    """

    def __init__(
        self,
        config: MlpSettings,
        rngs: nnx.Rngs,
        hint: Hint,
        *,
        fences: Pass = "none",
        width: int | None = None,
    ):
        D, F = config.embed, width or config.mlp_width
        init = nnx.initializers.normal(D**-0.5)
        down = nnx.initializers.normal(F**-0.5 / (2 * config.layers) ** 0.5)
        self.kind: Mlp = config.mlp_type
        if self.kind in GATED:
            self.gate = param(rngs, init, (D, F), ("embed", "mlp"))
        self.up = param(rngs, init, (D, F), ("embed", "mlp"))
        self.down = param(rngs, down, (F, D), ("mlp", "embed"))
        if config.biases == "all":
            zeros = nnx.initializers.zeros
            if self.kind in GATED:
                self.gate_bias = param(rngs, zeros, (F,), ("mlp",))
            self.up_bias = param(rngs, zeros, (F,), ("mlp",))
            self.down_bias = param(rngs, zeros, (D,), ("embed",))
        self.hint = hint
        self.fences: Pass = fences

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Map x `[B, L, D]`, laid out as the residual stream, to the same shape and layout."""
        # `_activated` expects the outputs of the input kernels in this order: gate (if the MLP is
        # gated), then up.
        names = ("gate", "up") if self.kind in GATED else ("up",)
        into = [getattr(self, name)[...] for name in names]
        down_FD, ring = self.down[...], self.hint.ring
        if ring is None:
            x_BLD = self.hint(x_BLD, *WITHIN, was=RESIDUAL)
            biases = [getattr(self, f"{name}_bias", None) for name in names]
            h_BLF = self._activated(
                *(biased(matmul(x_BLD, w), b) for w, b in zip(into, biases, strict=True))
            )
            y_BLD = self.hint(matmul(h_BLF, down_FD), *RESIDUAL, was=WITHIN)
            return biased(y_BLD, getattr(self, "down_bias", None))
        dims = RESIDUAL, *[("embed", "mlp")] * len(into), ("mlp", "embed")
        on_ring = self.hint.on_blocks(partial(self._on_ring, ring), *dims, axes=(ring.axis,))
        return on_ring(x_BLD, *(w.astype(x_BLD.dtype) for w in (*into, down_FD)))

    def _activated(self, *columns_BLF: jax.Array) -> jax.Array:
        """Return the hidden features of the MLP, after its nonlinearity.

        Args:
          columns_BLF: the products of x with gate and up, or with up alone.
        """
        names = ("mlp_gate", "mlp_up")[-len(columns_BLF) :]
        act = ACTIVATIONS[self.kind]
        first_BLF, *more = (
            fence(named(x_BLF, name), self.fences)
            for x_BLF, name in zip(columns_BLF, names, strict=True)
        )
        h_BLF = act(first_BLF) * more[0] if more else act(first_BLF)
        return fence(self.hint(h_BLF, "batch", "seq", "mlp"), self.fences)

    def _on_ring(
        self, ring: SequenceRing, x_BlD: jax.Array, *into_and_down: jax.Array
    ) -> jax.Array:
        """Compute the MLP on a ring of devices that split both the sequence and F."""
        # Each step of the ring multiplies a chunk of another device. No rule of `jaxdist.proofs`
        # can follow this, so `takes` declares to the proofs how the operands are split.
        x_BlD, *into = (takes(x, {ring.axis: 1}) for x in (x_BlD, *into_and_down[:-1]))
        down_FD = takes(into_and_down[-1], {ring.axis: 0})
        columns = ring.products(ring.gathered(x_BlD), *into)
        h_BlF = tuple(self._activated(*pieces) for pieces in zip(*columns, strict=True))
        (y_BlD,) = ring.products(h_BlF, down_FD, leaving=True)
        return gives(ring.reduced(y_BlD), {ring.axis: 1})
