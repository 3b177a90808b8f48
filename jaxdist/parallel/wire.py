"""The collectives of ZeRO: gathers of parameters, and sums of gradients into shards.

With codecs these are the collectives of ZeRO++ (Wang et al., arXiv 2306.10209). Parameters are
gathered as messages that are encoded from the exact shard of each device (section 3.1). A second
copy of the shards inside the fast network saves traffic on the slow network (3.2). Gradients are
sent as messages and summed in float32, first inside the fast network, then over the slow network
(3.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxdist.collectives.axis import Axis, axis_size
from jaxdist.collectives.bucket import unpack
from jaxdist.collectives.contract import Algorithm
from jaxdist.collectives.operations import all_gather, all_to_all, into_blocks
from jaxdist.collectives.split import gather_leaves, join_shards, scatter_leaves
from jaxdist.compression import Codec, first_round
from jaxdist.compression.sender import encode_once
from jaxdist.mesh import ICI


@dataclass(frozen=True)
class ZeroMessages:
    """The collectives of an exchange with ZeRO.

    Attributes:
      axes: the manual mesh axes over which tensors are split. The axis across the slowest network
        comes first.
      algorithm: the algorithm of the collectives.
      gather_dtype: the dtype in which parameters are sent and used, or None for the dtype in which
        they are stored.
      reduce_dtype: the dtype in which gradients are sent and summed, or None for the dtype of the
        gradients.
      ahead: whether the parameters of a layer are gathered while the previous layer computes.
      gather_codec: the codec of parameters in gathers, or None to send them uncompressed.
      reduce_codec: the codec of gradients, or None to send them uncompressed.
    """

    axes: tuple[str, ...]
    algorithm: Algorithm
    gather_dtype: str | None = None
    reduce_dtype: str | None = None
    ahead: bool = False
    gather_codec: Codec | None = None
    reduce_codec: Codec | None = None

    @property
    def fast(self) -> tuple[str, ...]:
        """The axes inside the fast network, or all axes if there is a single network."""
        fast = tuple(axis for axis in self.axes if axis.endswith(ICI))
        return fast or self.axes

    @property
    def slow(self) -> tuple[str, ...]:
        """The axes across the slow network, or an empty tuple if there is a single network."""
        return tuple(axis for axis in self.axes if axis not in self.fast)

    def gather(
        self, shards: Sequence[jax.Array], dims: Sequence[int], lengths: Sequence[int | None]
    ) -> list[jax.Array]:
        """Gather whole tensors from their shards, in `gather_dtype`.

        Args:
          shards: this device's shards.
          dims: the split dim of each tensor.
          lengths: the length of each split dim without padding, or None for a dim without padding.
        """
        if self.gather_codec is None:
            given = {"lengths": lengths, "algorithm": self.algorithm}
            return gather_leaves(self._carried(shards), dims, self.axes, **given)
        rows = [jnp.moveaxis(shard, dim, 0) for shard, dim in zip(shards, dims, strict=True)]
        flat = jnp.concatenate([row.reshape(-1).astype(jnp.float32) for row in rows])
        return self._joined(self._encoded(flat, self.axes), rows, shards, dims, lengths)

    def hold(self, shards: Sequence[jax.Array]) -> list[jax.Array]:
        """Gather shards across the slow network, as the input of `gather_seconds`.

        There are D fast networks. A device with the index f in its fast network gathers the shards
        of the D devices that have the index f in their fast networks.

        Returns:
          An array `[D, ...]` in `gather_dtype` for each shard `[...]`.
        """
        return [self._held(shard) for shard in shards]

    def gather_seconds(
        self, seconds: Sequence[jax.Array], dims: Sequence[int], lengths: Sequence[int | None]
    ) -> list[jax.Array]:
        """Gather whole tensors from the results of `hold`, inside the fast network only.

        The arguments `dims` and `lengths` are the same as for `gather`.
        """
        shards = [x[0] for x in seconds]
        rows = [jnp.moveaxis(x, dim + 1, 1) for x, dim in zip(seconds, dims, strict=True)]
        flat = jnp.concatenate([row.reshape(len(row), -1) for row in rows], axis=1)
        # There are D fast networks of I devices each. [I, D, total] becomes [D, I, total], because
        # shards are ordered along the slow axis first.
        blocks = all_gather(flat[None], self.fast, algorithm=self.algorithm)
        blocks = jnp.swapaxes(blocks, 0, 1).reshape(-1, flat.shape[1])
        return self._joined(blocks, [row[0] for row in rows], shards, dims, lengths)

    def scatter(self, grads: Sequence[jax.Array], dims: Sequence[int]) -> list[jax.Array]:
        """Sum gradients over devices, and return this device's shards of the sums.

        A split dim that the number of devices does not divide is padded with zeros. The shards are
        in `reduce_dtype`, or in float32 with a codec.

        Args:
          grads: this device's whole gradients.
          dims: the split dim of each gradient.
        """
        if self.reduce_codec is None:
            carried = [grad.astype(self.reduce_dtype or grad.dtype) for grad in grads]
            return scatter_leaves(carried, dims, self.axes, algorithm=self.algorithm)
        count = axis_size(self.axes)
        blocks = [into_blocks(g, dim, count) for g, dim in zip(grads, dims, strict=True)]
        rows = jnp.concatenate([b.reshape(count, -1).astype(jnp.float32) for b in blocks], axis=1)
        if self.slow:
            across, total = axis_size(self.slow), rows.shape[1]
            # Row f of `inside` has the rows for the devices that have the index f in their fast
            # networks. The device with index f of this network sums row f. Only these sums are sent
            # over the slow network.
            inside = jnp.swapaxes(rows.reshape(across, -1, total), 0, 1).reshape(-1, across * total)
            rows = self._summed(inside, self.fast).reshape(across, total)
        own = self._summed(rows, self.slow or self.fast)
        shards = unpack(own, [jax.eval_shape(lambda b: b[0], block) for block in blocks])
        return [jnp.moveaxis(s, 0, dim) for s, dim in zip(shards, dims, strict=True)]

    def _summed(self, rows: jax.Array, axis: Axis) -> jax.Array:
        """Send row i to device i as a message, and sum the received rows in float32."""
        # The codec keeps no state between steps, so every message is encoded as in a first round.
        codec, round = self.reduce_codec, first_round()
        assert codec is not None
        messages = jax.vmap(lambda row: encode_once(codec, row, (), round)[0])(rows)
        arrived = jax.tree.map(lambda m: all_to_all(m, axis, algorithm=self.algorithm), messages)
        return jax.vmap(lambda m: codec.decode(m, rows[0], round))(arrived).sum(0)

    def _held(self, shard: jax.Array) -> jax.Array:
        if self.gather_codec is None:
            (own,) = self._carried([shard])
            return all_gather(own[None], self.slow, algorithm=self.algorithm)
        blocks = self._encoded(shard.reshape(-1).astype(jnp.float32), self.slow)
        return blocks.reshape(-1, *shard.shape).astype(self.gather_dtype or shard.dtype)

    def _encoded(self, flat: jax.Array, axis: Axis) -> jax.Array:
        """Gather the arrays [n] of all N devices as messages of `gather_codec`, to [N, n]."""
        codec = self.gather_codec
        assert codec is not None
        message = encode_once(codec, flat, (), first_round())[0]
        gather = partial(all_gather, axis=axis, algorithm=self.algorithm)
        messages = jax.tree.map(lambda m: gather(m[None]), message)
        return jax.vmap(lambda m: codec.decode(m, flat, first_round()))(messages)

    def _carried(self, shards: Sequence[jax.Array]) -> list[jax.Array]:
        return [shard.astype(self.gather_dtype or shard.dtype) for shard in shards]

    def _joined(
        self,
        blocks: jax.Array,
        rows: Sequence[jax.Array],
        shards: Sequence[jax.Array],
        dims: Sequence[int],
        lengths: Sequence[int | None],
    ) -> list[jax.Array]:
        sizes = [
            len(blocks) * row.shape[0] if length is None else length
            for row, length in zip(rows, lengths, strict=True)
        ]
        wholes = join_shards(blocks, [row.shape for row in rows], dims, sizes)
        return [
            x.astype(self.gather_dtype or shard.dtype)
            for x, shard in zip(wholes, shards, strict=True)
        ]
