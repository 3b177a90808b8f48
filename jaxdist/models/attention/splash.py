"""The TPU's fused attention, a Pallas kernel of jax with memory linear in the sequence.

XLA cannot partition a Pallas kernel, so the kernel runs on each device's rows and heads separately.
The kernel declares no cost, so a ledger of the compiled program counts none of its FLOPs.

Dims: B batch, L sequence, H heads, K kv_heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax

from jaxdist.cost.kernels import LANES, splash_block
from jaxdist.models.attention.contract import KEPT, AttentionRequest
from jaxdist.models.hints import Hint

QUERIES = ("batch", "seq", "heads", "head_dim")
KEYS = ("batch", "seq", "kv_heads", "head_dim")


@dataclass(frozen=True)
class Splash:
    """The kernel `splash`: `jax.experimental.pallas.ops.tpu.splash_attention`.

    Attributes:
      family: the family of the chips, for example "v5e", on which the size of blocks depends.
      interpret: whether to interpret the kernel, which runs slowly on any device, for tests.
    """

    family: str = ""
    interpret: bool = False
    platform: str | None = field(default="tpu", init=False)

    def fits(self, ask: AttentionRequest) -> str | None:
        """Return why the TPU kernel does not support a request, or None if it does.

        The kernel needs TPUs, a sequence length that its blocks divide, and a split of the heads
        that keeps query heads together with their key heads.
        """
        if ask.platform not in (None, self.platform) and not self.interpret:
            return f"runs on TPUs, but the mesh has {ask.platform} devices"
        if ask.length is not None and ask.length % LANES:
            return f"needs a sequence that {LANES} divides, here it is {ask.length}"
        if ask.seq_parts > 1:
            return f"needs whole sequences, and a mesh axis splits them into {ask.seq_parts} parts"
        if ask.head_parts != ask.kv_head_parts and ask.kv_heads > 1:
            return (
                "needs kv_heads split as heads are, so that each is on the device of its "
                f"queries: here {ask.heads} heads are in {ask.head_parts} parts, {ask.kv_heads} "
                f"kv_heads in {ask.kv_head_parts}"
            )
        return None

    def __call__(
        self,
        q_BLHd: jax.Array,
        k_BLKd: jax.Array,
        v_BLKd: jax.Array,
        segments_BL: jax.Array | None,
        *,
        window: int | None,
        causal: bool,
        hint: Hint,
    ) -> jax.Array:
        """Compute attention, as `Kernel` specifies."""
        # The kernel itself does not scale the scores.
        q_BLHd = (q_BLHd * q_BLHd.shape[-1] ** -0.5).astype(q_BLHd.dtype)
        given: list[jax.Array] = [q_BLHd, k_BLKd, v_BLKd]
        dims: list[tuple[str, ...]] = [QUERIES, KEYS, KEYS]
        if segments_BL is not None:
            given.append(segments_BL)
            dims.append(QUERIES[:2])

        def local(
            q_BLHd: jax.Array, k_BLKd: jax.Array, v_BLKd: jax.Array, segments_BL: Any = None
        ) -> jax.Array:
            length, heads = q_BLHd.shape[1], q_BLHd.shape[2]
            attend = self._kernel(
                length, heads, window, causal=causal, narrow=q_BLHd.dtype.itemsize == 2
            )
            by_head = [x.swapaxes(1, 2) for x in (q_BLHd, k_BLKd, v_BLKd)]
            if segments_BL is None:
                return jax.vmap(attend)(*by_head).swapaxes(1, 2)
            return jax.vmap(attend)(*by_head, _both(segments_BL)).swapaxes(1, 2)

        return hint.on_blocks(local, *dims)(*given)

    def _kernel(
        self, length: int, heads: int, window: int | None, *, causal: bool, narrow: bool
    ) -> Callable[..., Any]:
        """Return a function from (q, k, v, segments) of one example to the result `[H, L, d]`.

        The function takes scaled queries `[H, L, d]`, and keys and values `[K, L, d]`.
        """
        # Imported here, because the import takes a third of a second and most runs do not need it.
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        shape = (length, length)
        forward, keys, queries = (
            splash_block(name, self.family, length, window=window, narrow=narrow)
            for name in ("fwd", "dkv", "dq")
        )
        if window is not None and window < length:
            mask = splash.LocalMask(shape, (window, 0 if causal else window), offset=0)
        else:
            mask = splash.CausalMask(shape) if causal else splash.FullMask(shape)
        sizes = splash.BlockSizes(
            block_q=forward,
            block_kv=forward,
            block_q_dkv=keys,
            block_kv_dkv=keys,
            block_q_dq=queries,
            block_kv_dq=queries,
        )
        return splash.make_splash_mha(
            splash.MultiHeadMask([mask] * heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=KEPT,
            interpret=self.interpret,
        )


def _both(segments_BL: jax.Array) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return splash.SegmentIds(segments_BL, segments_BL)
