"""Decoding with a cache of keys and values: the trained model computes one position at a time.

The model's blocks run unchanged, except that their attention is replaced by an attention that reads
and writes the cache.

Dims: B batch, L sequence, D embed, H heads, K kv_heads, G = H / K, d head_dim; N layers, W cached
positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.models.attention.choose import Attend
from jaxdist.models.attention.contract import AttentionRequest, Qkv
from jaxdist.models.functional import Functional
from jaxdist.models.gpt import Gpt
from jaxdist.models.hints import RESIDUAL, Hint
from jaxdist.models.layers import whole
from jaxdist.types import Params

SEPARATE_BYTES = 1 << 23
"""The least size of a layer for which `layer_views` returns separate layers. A smaller layer stays
in a CPU's cache between its copy and its use."""
HIDDEN = -0.7 * float(np.finfo(np.float32).max)
"""The score of a key that a query does not see: finite, so that its weight is 0 and not NaN."""


class Cache(NamedTuple):
    """The keys and values of all positions so far, in the compute dtype.

    Attributes:
      keys: the keys, `[N, B, K, W, d]`.
      values: the values, `[N, B, K, d, W]`, with positions last, because products sum over
        positions.
    """

    keys: jax.Array
    values: jax.Array


def reason_against(model: Functional, hint: Hint) -> str | None:
    """Return a clause that explains why decoding cannot use a cache, or None if a cache works."""
    module: Any = nnx.eval_shape(lambda: model.make(nnx.Rngs(0)))
    if not isinstance(module, Gpt):
        return f"{type(module).__name__} is not the decoder gpt"
    if module.experts is not None:
        return "blocks with experts also return the measurements of their routers"
    if hint.parts("residual_seq") > 1 or hint.parts("seq") > 1:
        return "the mesh splits the sequence, and a step has a single position"
    return None


def empty_cache(model: Gpt, rows: int, length: int) -> Cache:
    """Return a cache of zeros for `rows` sequences of at most `length` tokens."""
    config = model.config
    heads, layers = config.kv_heads or config.heads, config.layers
    zeros = jnp.zeros((layers, rows, heads, length, config.head_dim), config.compute_dtype)
    return _laid_out(Cache(zeros, zeros.swapaxes(-1, -2)), model.hint)


def decode(
    model: Gpt,
    tokens_BL: jax.Array,
    at_BL: jax.Array,
    cache: Cache,
    *,
    window: int,
    layers: Sequence[Params] = (),
) -> tuple[jax.Array, Cache]:
    """Run the model on tokens; return hidden states `[B, L, D]`, and the cache with these tokens.

    Args:
      tokens_BL: the tokens: a single token of each sequence, or the first L tokens of each
        sequence.
      at_BL: the positions of the tokens; if L is more than 1, they must be 0..L-1.
      cache: the cache of the earlier positions.
      window: the number of positions of a sequence in training, which exceeds all of `at_BL`.
      layers: the parameters of the blocks as `layer_views` returns them, which replace the
        model's parameters unless they are empty.
    """
    x_BLD = model.embed(tokens_BL, at_BL=at_BL)
    graph, state = nnx.split(model.blocks)

    def body(
        carry: tuple[jax.Array, Cache], layer: tuple[jax.Array, Any]
    ) -> tuple[tuple[jax.Array, Cache], None]:
        x_BLD, cache = carry
        number, params = layer
        block: Any = nnx.merge(graph, whole(params))
        # The loop carries the cache of all layers, so that XLA updates it in place.
        reads = CachedAttention(block.attention.attend, cache, number, (at_BL, window))
        block.attention.attend = reads
        x_BLD = block(x_BLD, None)
        return (x_BLD, _laid_out(reads.cache, model.hint)), None

    carry, traced_once = (x_BLD, cache), jax.jit(body)
    for i, layer in enumerate(layers):
        own = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(layer))
        carry, _ = traced_once(carry, (jnp.int32(i), own))
    if not layers:
        numbers = jnp.arange(jax.tree.leaves(state)[0].shape[0])
        carry, _ = jax.lax.scan(body, carry, (numbers, state))
    return model.hint(carry[0], *RESIDUAL), carry[1]


def layer_views(params: Params, *, least: int = SEPARATE_BYTES) -> tuple[Params, ...]:
    """Return the parameters of each block of a `Gpt` as arrays that share memory with the stacks.

    On CPUs, XLA copies the parameters of a layer out of the stacks for each token, which takes
    longer than products with few rows. But a program with separate layers takes longer to compile.

    The result is empty if the parameters are not on CPUs, if the dim of layers is split, or if a
    device holds fewer than `least` bytes of a layer.
    """
    stacks, structure = jax.tree.flatten(params["blocks"])
    shards = [stack.sharding.shard_shape(stack.shape) for stack in stacks]
    layers = len(stacks[0])
    held = sum(
        math.prod(shape[1:]) * stack.dtype.itemsize
        for stack, shape in zip(stacks, shards, strict=True)
    )
    platforms = {device.platform for stack in stacks for device in stack.sharding.device_set}
    if platforms != {"cpu"} or {shape[0] for shape in shards} != {layers} or held < least:
        return ()
    views = [_views(stack) for stack in stacks]
    return tuple(structure.unflatten(own) for own in zip(*views, strict=True))


def _views(stack: jax.Array) -> list[jax.Array]:
    """Return the slices of an array on CPUs along its first dim; aligned slices are not copied."""
    held = [(np.asarray(shard.data), shard.device) for shard in stack.addressable_shards]
    assert isinstance(stack.sharding, NamedSharding), stack.sharding
    sharding = NamedSharding(stack.sharding.mesh, PartitionSpec(*stack.sharding.spec[1:]))
    found = []
    for i in range(len(stack)):
        pieces = [jax.device_put(data[i], device, may_alias=True) for data, device in held]
        shape = stack.shape[1:]
        found.append(jax.make_array_from_single_device_arrays(shape, sharding, pieces))
    return found


@dataclass
class CachedAttention:
    """The attention of a layer with a cache, which replaces `Attend` while a block runs.

    Attributes:
      inner: the attention that is replaced.
      cache: the cache of all layers, which a call updates.
      layer: the index of the layer.
      at: the positions of the queries, int32 `[B, L]`, and a number that exceeds all positions.
    """

    inner: Attend
    cache: Cache
    layer: jax.Array
    at: tuple[jax.Array, int]

    @property
    def ask(self) -> AttentionRequest:
        """The attention request of `inner`, the attention that is replaced."""
        return self.inner.ask

    def __call__(self, given: Qkv) -> jax.Array:
        """Write the positions' keys and values to the cache, and attend to all positions so far.

        Args:
          given: the queries, keys and values of the positions. Only a call with several positions
            uses the segments.
        """
        q_BLHd, k_BLKd, v_BLKd, _ = given
        keys, values = self.cache
        if q_BLHd.shape[1] > 1:
            start = self.layer, 0, 0, 0, 0
            new = k_BLKd.transpose(0, 2, 1, 3)[None], v_BLKd.transpose(0, 2, 3, 1)[None]
            update = jax.lax.dynamic_update_slice
            self.cache = Cache(update(keys, new[0], start), update(values, new[1], start))
            return self.inner(given)
        rows, heads = jnp.arange(keys.shape[1])[:, None], jnp.arange(keys.shape[2])[None]
        at_B1 = self.at[0]
        keys = keys.at[self.layer, rows, heads, at_B1].set(k_BLKd[:, 0])
        values = values.at[self.layer, rows, heads, :, at_B1].set(v_BLKd[:, 0])
        self.cache = Cache(keys, values)
        return self._last(q_BLHd, keys[self.layer], values[self.layer], at_B1)

    def _last(
        self, q_B1Hd: jax.Array, k_BKWd: jax.Array, v_BKdW: jax.Array, at_B1: jax.Array
    ) -> jax.Array:
        """Compute attention of a single position, with the operations of the kernel `plain`."""
        B, _, H, d = q_B1Hd.shape
        q_BKGd = q_B1Hd.reshape(B, k_BKWd.shape[1], -1, d)
        wide = {"preferred_element_type": jnp.float32}
        scores_BKGW = jnp.einsum("bkgd,bkwd->bkgw", q_BKGd, k_BKWd, **wide) * d**-0.5
        distance_BW = at_B1 - jnp.arange(k_BKWd.shape[2])[None]
        reach = k_BKWd.shape[2] if self.ask.window is None else self.ask.window
        seen_BW = (distance_BW >= 0) & (distance_BW <= reach)
        scores_BKGW = jnp.where(seen_BW[:, None, None], scores_BKGW, HIDDEN)
        weights_BKGW = jax.nn.softmax(scores_BKGW, -1).astype(v_BKdW.dtype)
        return jnp.einsum("bkgw,bkdw->bkgd", weights_BKGW, v_BKdW).reshape(B, 1, H, d)


def _laid_out(cache: Cache, hint: Hint) -> Cache:
    keys = hint(cache.keys, None, "batch", "kv_heads", None, "head_dim")
    return Cache(keys, hint(cache.values, None, "batch", "kv_heads", "head_dim", None))
