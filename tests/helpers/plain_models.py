"""Transformers that a user of flax would write, without names of dims; two do not use jaxdist."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxdist.models.layers import Stacked, stack

WIDTH, VOCAB = 16, 64


class Block(nnx.Module):
    """A pre-norm block of attention and an MLP, from layers of flax."""

    def __init__(self, rngs: nnx.Rngs, *, dropout: float = 0.0) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.dropout(self.down(nnx.gelu(self.up(x))))


class Ends(nnx.Module):
    """The layers before and after the blocks."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.table = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.output = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def embed(self, tokens: jax.Array, segments: Any = None) -> jax.Array:
        return self.table(tokens)

    def head(self, x: jax.Array) -> jax.Array:
        return self.output(x)


class Listed(Ends):
    """A model with a list of blocks, which run one after another."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 4) -> None:
        super().__init__(rngs)
        self.blocks = nnx.List(Block(rngs) for _ in range(layers))

    def __call__(self, tokens: jax.Array, segments: Any = None) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def vmapped(rngs: nnx.Rngs, layers: int, **settings: Any) -> nnx.Module:
    """Return a stack of blocks, created as in the guide of flax."""

    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(rngs, **settings)

    return make(rngs)


class Vmapped(Ends):
    """A model whose blocks are stacked by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, rngs: nnx.Rngs, layers: int = 4) -> None:
        super().__init__(rngs)
        self.blocks = vmapped(rngs, layers)

    def trunk(self, x: jax.Array, tokens: Any = None, segments: Any = None) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, block: Any) -> jax.Array:
            return block(x)

        return run(x, self.blocks)

    def __call__(self, tokens: jax.Array, segments: Any = None) -> jax.Array:
        return self.head(self.trunk(self.embed(tokens)))


class Helped(Ends, Stacked):
    """A model with the trunk of jaxdist, whose blocks are stacked by `stack` or by `nnx.vmap`."""

    def __init__(
        self, rngs: nnx.Rngs, layers: int = 4, *, by_vmap: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__(rngs)
        if by_vmap:
            self.blocks = vmapped(rngs, layers, dropout=dropout)
        else:
            self.blocks = stack(lambda rngs: Block(rngs, dropout=dropout), layers, rngs)
