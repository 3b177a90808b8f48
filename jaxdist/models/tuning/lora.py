"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) of a model's kernels.

A kernel W is frozen and replaced by W + scale A B, where A `[*inputs, rank]` and B `[rank,
*outputs]` are trained. The sum is computed where the kernel is read, layer by layer in a stack.
Adapters therefore work for models of any library and under every plan. The costs are a product of A
and B for each kernel and pass, and memory for the full gradients of one layer's kernels during its
backward pass.
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
"""The key of the adapters in the tree of parameters."""


@dataclass(frozen=True)
class Adapter:
    """The shape and the settings of a kernel's adapter.

    Attributes:
      name: the name of the kernel.
      shape: the shape of the kernel, without the dim that counts layers.
      dims: the logical dims of the kernel, including the dim that counts layers if there is one.
      layers: the number of stacked layers, or None without a stack.
      inputs: the number of dims of the kernel that are inputs; these dims come first.
      rank: the rank of the product.
      scale: the factor of the product.
      dropout: the fraction of the inputs that are dropped in training.
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
        """The names of the adapter's parameters A and B."""
        return f"{PREFIX}/{self.name}/a", f"{PREFIX}/{self.name}/b"

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of the factors A and B, with a first dim for the layers of a stack."""
        more = () if self.layers is None else (self.layers,)
        ins, outs = self.shape[: self.inputs], self.shape[self.inputs :]
        return (*more, *ins, self.rank), (*more, self.rank, *outs)

    @property
    def all_dims(self) -> tuple[Dims, Dims]:
        """The logical dims of the factors A and B, with a first dim for the layers of a stack.

        The dim of the rank is never split.
        """
        first = len(self.dims) - len(self.shape)
        more, own = self.dims[:first], self.dims[first:]
        return (*more, *own[: self.inputs], None), (*more, None, *own[self.inputs :])

    def init(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the initial factors A and B.

        A is drawn uniformly, as torch draws a linear layer. B is 0, so that A B is 0 at first.
        """
        of_a, of_b = self.shapes
        bound = math.prod(self.shape[: self.inputs]) ** -0.5
        return jax.random.uniform(key, of_a, jnp.float32, -bound, bound), jnp.zeros(of_b)


def adapter_of(
    config: LoraConfig, name: str, shape: tuple[int, ...], dims: Dims, *, stacked: bool
) -> Adapter | None:
    """Return the adapter of a kernel, or None for a parameter that is a bias or a scale.

    Args:
      name: the name of the parameter.
      shape, dims: the shape and the dims of the parameter, including the dim that counts layers if
        there is one.
      stacked: whether the first dim counts layers.
    """
    layers, own = (shape[0], shape[1:]) if stacked else (None, shape)
    if len(own) < 2:
        return None
    given = (config.rank, config.scale, config.dropout)
    return Adapter(name, own, dims, layers, input_dims(own, dims[len(shape) - len(own) :]), *given)


def input_dims(shape: Sequence[int], dims: Dims) -> int:
    """Return the number of a kernel's dims that are inputs.

    If the first dim is "embed", it is the only input. Otherwise, if the last dim is "embed", it is
    the only output. All other kernels are divided where the sizes of inputs and outputs are most
    nearly equal: where the larger size divided by the smaller size is least. If several divisions
    have this quotient, the division with the most inputs is used.

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
    """A placeholder for a kernel plus its adapter; the sum is computed where the kernel is used.

    Attributes:
      base, a, b: the kernel and the adapter's two parameters: arrays or placeholders.
      key: the random key of the dropout, or a key for each layer of a stack; None drops nothing.
      adapter: the settings of the adapter.
    """

    base: Any
    a: Any
    b: Any
    key: jax.Array | None
    adapter: Adapter

    @classmethod
    def whole(cls, several: Sequence[Any]) -> list[jax.Array]:
        """Gather the arrays of all kernels together; return each kernel plus its adapter."""
        parts = whole([(one.base, one.a, one.b) for one in several])
        return [one.merged(*part) for one, part in zip(several, parts, strict=True)]

    def carried(self) -> jax.Array:
        raise AssertionError(
            "`carried` was called for an adapted kernel, which exists only while a function "
            "is differentiated"
        )

    @property
    def merges(self) -> bool:
        """Whether the parameter is computed from other parameters, which is always true here."""
        return True

    @property
    def copied(self) -> bool:
        """Whether the kernel without its adapter is copied to the device in each pass."""
        return isinstance(self.base, Deferred) and self.base.copied

    def merged(self, base: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return the kernel plus its adapter, under the name `MERGED`.

        Because of this name, the backward pass recomputes the sum instead of keeping it.
        """
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
        """Return a placeholder from its adapter and arrays: the inverse of `tree_flatten`."""
        base, a, b, key = arrays
        return cls(base, a, b, key, adapter)


def merged(
    adapter: Adapter, base: jax.Array, a: jax.Array, b: jax.Array, key: jax.Array | None = None
) -> jax.Array:
    """Return a single layer's kernel plus its adapter, in the kernel's dtype.

    Args:
      base: the kernel without the adapter.
      a, b: the parameters of the adapter.
      key: the random key of the dropout; None drops nothing.
    """
    if key is not None and adapter.dropout:
        kept = 1.0 - adapter.dropout
        # A row of A that is set to zero drops an input feature, although the inputs are unknown
        # here.
        mask = jax.random.bernoulli(key, kept, (*a.shape[:-1], 1))
        a = jnp.where(mask, a / kept, 0.0)
    return base + (adapter.scale * jnp.tensordot(a, b, 1)).astype(base.dtype)


def bound(
    adapters: Sequence[Adapter], values: Mapping[str, Leaf], key: jax.Array | None
) -> dict[str, Merged]:
    """Return a `Merged` for each kernel that has an adapter, by the kernel's name.

    Args:
      values: the parameters of kernels and adapters by name: arrays or placeholders.
      key: the random key of the dropout; None drops nothing.
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
    """Return the initial parameters of adapters, by name."""
    drawn: dict[str, jax.Array] = {}
    for number, adapter in enumerate(adapters):
        drawn |= zip(adapter.names, adapter.init(jax.random.fold_in(key, number)), strict=True)
    return drawn


def merge(adapters: Sequence[Adapter], values: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the parameters without adapters, by name; each adapter is added to its kernel.

    The sum is computed in float32. Every parameter keeps its dtype.
    """
    made = bound(adapters, values, None)
    own = {name: x for name, x in values.items() if not name.startswith(f"{PREFIX}/")}
    wide = {
        name: one.merged(*(part.astype(jnp.float32) for part in (one.base, one.a, one.b)))
        for name, one in made.items()
    }
    return {**own, **{name: x.astype(own[name].dtype) for name, x in wide.items()}}
