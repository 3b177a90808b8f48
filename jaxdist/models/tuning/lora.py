"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) of a model's kernels.

A kernel W is frozen and computes as W + scale A B, where A `[*inputs, rank]` and B `[rank,
*outputs]` are trained. The sum is made where the kernel is read, layer by layer in a stack, so that
models of any library have adapters, under every plan. The sum costs a product of A and B per kernel
and pass, and memory for whole gradients of a layer's kernels while its backward pass runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxdist.models.layers import MERGED, Deferred, whole
from jaxdist.models.tuning.part import LoraConfig
from jaxdist.types import Dims, Leaf

PREFIX = "lora"
"""The key of the adapters among the parameters."""


@dataclass(frozen=True)
class Adapter:
    """The form of a kernel's adapter.

    Attributes:
      name: name of the kernel.
      shape: shape of the kernel, without the dim that counts layers.
      dims: logical dims of the kernel, with the dim that counts layers.
      layers: number of stacked layers, or None without a stack.
      inputs: number of the kernel's dims that are inputs; they come first.
      rank: rank of the product.
      scale: factor of the product.
      dropout: fraction of the inputs that are dropped in training.
    """

    name: str
    shape: tuple[int, ...]
    dims: Dims
    layers: int | None
    inputs: int
    rank: int
    scale: float
    dropout: float

    @property
    def names(self) -> tuple[str, str]:
        """The names of the parameters A and B."""
        return f"{PREFIX}/{self.name}/a", f"{PREFIX}/{self.name}/b"

    @property
    def layer_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of a single layer's A and B."""
        ins, outs = self.shape[: self.inputs], self.shape[self.inputs :]
        return (*ins, self.rank), (self.rank, *outs)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of A and B."""
        more = () if self.layers is None else (self.layers,)
        of_a, of_b = self.layer_shapes
        return (*more, *of_a), (*more, *of_b)

    @property
    def layer_dims(self) -> tuple[Dims, Dims]:
        """The logical dims of a single layer's A and B; the dim of the rank is never split."""
        own = self.dims[len(self.dims) - len(self.shape) :]
        return (*own[: self.inputs], None), (None, *own[self.inputs :])

    @property
    def all_dims(self) -> tuple[Dims, Dims]:
        """The logical dims of A and B."""
        more = self.dims[: len(self.dims) - len(self.shape)]
        of_a, of_b = self.layer_dims
        return (*more, *of_a), (*more, *of_b)

    def init(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draw A uniformly, as torch does for a linear layer; B is 0, so that A B starts at 0."""
        of_a, of_b = self.shapes
        bound = math.prod(self.shape[: self.inputs]) ** -0.5
        return jax.random.uniform(key, of_a, jnp.float32, -bound, bound), jnp.zeros(of_b)


def adapter_of(
    config: LoraConfig, name: str, shape: tuple[int, ...], dims: Dims, *, stacked: bool
) -> Adapter | None:
    """Return the adapter of a parameter, or None for a bias or a scale, which is not a kernel.

    Args:
      shape, dims: shape and dims of the parameter, with the dim that counts layers.
    """
    layers, own = (shape[0], shape[1:]) if stacked else (None, shape)
    if len(own) < 2:
        return None
    given = (config.rank, config.scale, config.dropout)
    return Adapter(name, own, dims, layers, input_dims(own, dims[len(shape) - len(own) :]), *given)


def input_dims(shape: Sequence[int], dims: Dims) -> int:
    """Return how many of a kernel's dims are inputs.

    A first dim "embed" is the only input, and a last dim "embed" the only output. Other kernels are
    cut where the sizes of inputs and outputs differ least, with the most dims as inputs.

    >>> input_dims((64, 2, 64), ("embed", "heads", "head_dim"))
    1
    >>> input_dims((3, 3, 16, 32), (None,) * 4)
    3
    """
    if "embed" in (dims[0], dims[-1]):
        return 1 if dims[0] == "embed" else len(shape) - 1

    def apart(inputs: int) -> tuple[float, int]:
        ins, outs = math.prod(shape[:inputs]), math.prod(shape[inputs:])
        return max(ins, outs) / max(1, min(ins, outs)), -inputs

    return min(range(1, len(shape)), key=apart)


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class Merged(Deferred):
    """A kernel with its adapter, whose product is added where the kernel is used.

    Attributes:
      base, a, b: arrays, or placeholders of them.
      key: random key of the dropout, one for each layer of a stack; None drops nothing.
    """

    base: Any
    a: Any
    b: Any
    key: jax.Array | None
    adapter: Adapter

    @classmethod
    def whole(cls, several: Sequence[Any]) -> list[jax.Array]:
        """Gather the parts of several kernels together, and add each product to its kernel."""
        parts = whole([(one.base, one.a, one.b) for one in several])
        return [one.merged(*part) for one, part in zip(several, parts, strict=True)]

    def carried(self) -> jax.Array:
        raise AssertionError("kernels with adapters are made inside of what is differentiated")

    @property
    def merges(self) -> bool:
        """Whether the parameter is computed from others."""
        return True

    def merged(self, base: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return the sum, with the name by which the backward pass recomputes it."""
        if base.ndim == len(self.adapter.shape):
            return checkpoint_name(merged(self.adapter, base, a, b, self.key), MERGED)
        if self.key is None:
            return jax.vmap(lambda *own: merged(self.adapter, *own))(base, a, b)
        return jax.vmap(lambda *own: merged(self.adapter, *own))(base, a, b, self.key)

    def tree_flatten(self) -> tuple[tuple[Any, ...], Adapter]:
        """Return the arrays as children, and the adapter as static data."""
        return (self.base, self.a, self.b, self.key), self.adapter

    @classmethod
    def tree_unflatten(cls, adapter: Adapter, arrays: Sequence[Any]) -> Merged:
        """Invert `tree_flatten`."""
        base, a, b, key = arrays
        return cls(base, a, b, key, adapter)


def merged(
    adapter: Adapter, base: jax.Array, a: jax.Array, b: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """Return a single layer's kernel plus its adapter, in the kernel's dtype."""
    if key is not None and adapter.dropout:
        kept = 1.0 - adapter.dropout
        # Zeroing rows of A drops input features, although the inputs are not known here.
        mask = jax.random.bernoulli(key, kept, (*a.shape[:-1], 1))
        a = jnp.where(mask, a / kept, 0.0)
    return base + (adapter.scale * jnp.tensordot(a, b, 1)).astype(base.dtype)


def bound(
    adapters: Sequence[Adapter], values: Mapping[str, Leaf], key: jax.Array | None
) -> dict[str, Merged]:
    """Return each kernel with its adapter as a `Merged`, by the kernel's name.

    Args:
      values: parameters of kernels and adapters by name; they may be placeholders.
      key: random key of the dropout; None drops nothing.
    """
    found = {}
    for number, adapter in enumerate(adapters):
        a, b = (values[name] for name in adapter.names)
        own = None
        if key is not None and adapter.dropout:
            own = jax.random.fold_in(key, number)
            if adapter.layers is not None:
                count = adapter.layers if isinstance(a, Deferred) else a.shape[0]
                own = jax.random.split(own, count)
        found[adapter.name] = Merged(values[adapter.name], a, b, own, adapter)
    return found


def init(adapters: Sequence[Adapter], key: jax.Array) -> dict[str, jax.Array]:
    """Draw the parameters of adapters, by name."""
    drawn: dict[str, jax.Array] = {}
    for number, adapter in enumerate(adapters):
        drawn |= zip(adapter.names, adapter.init(jax.random.fold_in(key, number)), strict=True)
    return drawn


def merge(adapters: Sequence[Adapter], values: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the model's own parameters by name, with each adapter added to its kernel in float32.

    Every parameter keeps its dtype.
    """
    made = bound(adapters, values, None)
    own = {name: x for name, x in values.items() if not name.startswith(f"{PREFIX}/")}
    wide = {
        name: one.merged(*(part.astype(jnp.float32) for part in (one.base, one.a, one.b)))
        for name, one in made.items()
    }
    return {**own, **{name: x.astype(own[name].dtype) for name, x in wide.items()}}
