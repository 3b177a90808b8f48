"""The TPU's fused attention, a Pallas kernel of jax with memory linear in the sequence.

XLA cannot partition a Pallas kernel, so the kernel runs on each device's rows and heads separately.
The kernel declares no cost, so a ledger of the compiled program counts none of its FLOPs.

Dims: B batch, L sequence, l a device's piece of the sequence, H heads, K kv_heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax

from jaxdist.cost.context import SequenceSplit, positions_of
from jaxdist.cost.kernels import LANES, splash_block
from jaxdist.hlo.source.marks import takes
from jaxdist.models.attention.contract import KEPT, AttentionRequest, Kernel, Qkv
from jaxdist.models.hints import Hint

QUERIES = ("batch", "seq", "heads", "head_dim")
KEYS = ("batch", "seq", "kv_heads", "head_dim")


def dims_of_arrays(given: Qkv) -> list[tuple[str, ...]]:
    """Return the logical dims of each array in `given`; segments that are None have no entry."""
    return [QUERIES, KEYS, KEYS, QUERIES[:2]][: len(jax.tree.leaves(given))]


@dataclass(frozen=True)
class Splash(Kernel):
    """The kernel `splash`: `jax.experimental.pallas.ops.tpu.splash_attention`.

    Attributes:
      family: the family of the chips, for example "v5e", on which the size of blocks depends.
      interpret: whether the kernel is interpreted. Tests set it, since the kernel then runs on
        any device, although slowly.
    """

    family: str = ""
    interpret: bool = False
    platform: ClassVar[str | None] = "tpu"

    def fits(self, ask: AttentionRequest) -> str | None:
        """Return why the TPU kernel does not support a request, or None if the kernel supports it.

        The kernel needs TPUs, whole sequences of a length that `LANES` divides, and a split of the
        heads that keeps query heads together with their key heads.
        """
        if ask.platform not in (None, self.platform) and not self.interpret:
            return f"runs on TPUs, but the mesh has {ask.platform} devices"
        if ask.length is not None and ask.length % LANES:
            return f"needs a sequence length that {LANES} divides, but here it is {ask.length}"
        if ask.seq_parts > 1:
            return f"needs whole sequences, but a mesh axis splits them into {ask.seq_parts} parts"
        if ask.head_parts != ask.kv_head_parts and ask.kv_heads > 1:
            return (
                "needs kv_heads to be split like heads, so that each key head is on the device of "
                f"its queries, but here {ask.heads} heads are in {ask.head_parts} parts, and "
                f"{ask.kv_heads} kv_heads are in {ask.kv_head_parts}"
            )
        return None

    def __call__(self, given: Qkv, *, window: int | None, causal: bool, hint: Hint) -> jax.Array:
        """Compute attention, as `Kernel` specifies."""
        scaled = given._replace(q=_scaled(given.q))

        def local(*arrays: jax.Array) -> jax.Array:
            *qkv, segments_BL = Qkv(*arrays)
            ordered = np.arange(qkv[0].shape[1], dtype=np.int32)
            kernel = self._kernel(qkv[0], ordered, 1, 0, window, causal=causal)
            return _each(kernel, qkv, None if segments_BL is None else (segments_BL, segments_BL))

        return hint.on_blocks(local, *dims_of_arrays(given))(*jax.tree.leaves(scaled))

    def pieces(
        self,
        split: SequenceSplit,
        group: jax.Array,
        q_BlHd: jax.Array,
        k_BLKd: jax.Array,
        v_BLKd: jax.Array,
        segments: tuple[jax.Array, jax.Array] | None,
        *,
        window: int | None,
        causal: bool,
    ) -> jax.Array:
        """Compute the attention of a group's queries to the keys of the whole sequence.

        Args:
          split: the method by which devices share the sequence.
          group: the number of this device's group.
          q_BlHd: the group's queries, in the order of the split.
          k_BLKd, v_BLKd: all keys and values, in the order of the sequence.
          segments: the document numbers of the queries and of the keys, or None if documents are
            not isolated.
          window, causal: see `AttentionRequest`.
        """
        q_BlHd = _scaled(q_BlHd)
        positions = positions_of(split.order, k_BLKd.shape[1], split.groups)
        kernel = self._kernel(
            q_BlHd, positions, split.groups, group, window, causal=causal, axes=split.axes
        )
        return _each(kernel, (q_BlHd, k_BLKd, v_BLKd), segments)

    def _kernel(
        self,
        q_BlHd: jax.Array,
        positions: np.ndarray,
        groups: int,
        group: jax.Array | int,
        window: int | None,
        *,
        causal: bool,
        axes: tuple[str, ...] = (),
    ) -> Callable[..., Any]:
        """Return a function from (q, k, v, segments) of one example to the result `[H, l, d]`.

        The function expects queries `[H, l, d]` that are already scaled, and keys and values `[K,
        L, d]`.

        Args:
          q_BlHd: the queries of a group.
          positions: the positions of the queries of all groups, int32 `[L]`.
          groups: the number of groups, each with an equal part of the queries.
          group: the number of this group.
          window, causal: see `AttentionRequest`.
          axes: the mesh axes of the groups.
        """
        # The import is here, because it takes a third of a second and most runs do not need splash.
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        from jaxdist.models.attention.masks import Near, NearMask

        length, heads, narrow = len(positions), q_BlHd.shape[2], q_BlHd.dtype.itemsize == 2
        # The kernel computes the fewest masked scores if each block has consecutive positions of a
        # single chunk.
        chunks = 1 if groups == 1 else 2 * groups if length % (2 * groups * LANES) == 0 else groups
        forward, keys, queries = (
            splash_block(name, self.family, length, window=window, narrow=narrow, chunks=chunks)
            for name in ("fwd", "dkv", "dq")
        )
        span = None if window is None or window >= length else window
        mask: Any = NearMask(Near(span, 0 if causal else span), positions)
        if span is None and not causal:
            # Without a window and causality, the mask is the same for every group of devices.
            mask, groups = splash.FullMask((q_BlHd.shape[1], length)), 1
        sizes = splash.BlockSizes(
            block_q=forward,
            block_kv=forward,
            block_q_dkv=keys,
            block_kv_dkv=keys,
            block_q_dq=queries,
            block_kv_dq=queries,
        )
        kernel = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=groups,
            residual_checkpoint_name=KEPT,
            interpret=self.interpret,
        )
        if groups == 1:
            return kernel
        # The mask is an operand of `attend_shared`, and no axis splits it: all devices have the
        # whole mask.
        whole = dict.fromkeys(axes)
        return jax.tree.map(lambda x: _part(takes(x, whole), group, groups), kernel)


def _part(x: jax.Array, group: jax.Array | int, groups: int) -> jax.Array:
    """Return a group's part of an array of the mask, along the dim of blocks or positions."""
    axis = min(1, x.ndim - 1)
    size = x.shape[axis] // groups
    return lax.dynamic_slice_in_dim(x, group * size, size, axis)


def _scaled(q_BLHd: jax.Array) -> jax.Array:
    # The kernel itself does not scale the scores.
    return (q_BLHd * q_BLHd.shape[-1] ** -0.5).astype(q_BLHd.dtype)


def _each(
    kernel: Callable[..., Any],
    qkv: Sequence[jax.Array],
    segments: tuple[jax.Array, jax.Array] | None,
) -> jax.Array:
    """Apply the kernel to each example of a batch, whose queries are already scaled."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    given: list[Any] = [x.swapaxes(1, 2) for x in qkv]
    if segments is not None:
        given.append(splash.SegmentIds(*segments))
    return jax.vmap(kernel)(*given).swapaxes(1, 2)
