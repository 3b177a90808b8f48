"""A modern decoder: RMSNorm, rotary positions, SwiGLU, grouped-query attention, scan over layers.

Dims: B batch, L sequence, D embed, H heads, K kv_heads, d head_dim, F mlp, V vocab.
"""

from __future__ import annotations

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field, model_validator

from jaxdist.config.schema import Config, Count
from jaxdist.errors import ConfigError
from jaxdist.models.layers import (
    RESIDUAL,
    WITHIN,
    ComputeDtype,
    Hint,
    RMSNorm,
    Stacked,
    matmul,
    no_hint,
    param,
    rotate,
    stack,
)
from jaxdist.models.remat import RematConfig, named


class GptConfig(Config):
    """A decoder-only transformer for next-token prediction."""

    type: Literal["gpt"]
    """Selects this model."""
    layers: Count
    """Number of blocks."""
    embed: Count
    """Width of the residual stream."""
    heads: Count
    """Query heads; must divide embed into even head sizes."""
    kv_heads: Count | None = None
    """Key and value heads shared by groups of query heads; null is one each (multi-head)."""
    mlp: Count | None = None
    """Hidden width of the SwiGLU; null is 8/3 of embed, rounded up to a multiple of 64."""
    vocab_multiple: Count = 64
    """The embedding table is padded to a multiple of this, so that it divides over a mesh."""
    tied_head: bool = True
    """Use the embedding table as the output head."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base wavelength of the rotary positions."""
    isolate_documents: bool = False
    """Block attention across the documents packed in one window."""
    attention: Literal["auto", "xla", "cudnn"] = "auto"
    """Kernel of `jax.nn.dot_product_attention`; auto is cuDNN's on a mesh of GPUs in bfloat16."""
    compute_dtype: ComputeDtype = "float32"
    """Dtype of activations and matmuls; parameters are float32."""
    remat: RematConfig | Annotated[tuple[RematConfig, ...], Field(min_length=1)] = "none"
    """What the backward pass recomputes: nothing, cheap operations on single elements (rotations,
    products, masks), all but matmul results, or whole blocks; or all but the activations of a
    preset; or what a mapping says of each activation, `{query: save, attention: offload}` (to the
    host's memory; those that are not named are recomputed); or a list that says it block by block,
    over and over (anew in each chunk of a pipeline): `[full, none]` recomputes every other
    block."""
    scan_unroll: Count = 1
    """Blocks per iteration of the loop over layers: more compile time, less loop overhead."""

    @model_validator(mode="after")
    def _check(self) -> GptConfig:
        if self.embed % self.heads or (self.embed // self.heads) % 2:
            raise ValueError(
                f"embed {self.embed} over heads {self.heads} must give an even head size: "
                f"use heads {_even_heads(self.embed, self.heads)}"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        if self.scan_unroll > self.layers:
            raise ValueError(f"scan_unroll {self.scan_unroll} exceeds layers {self.layers}")
        if isinstance(self.remat, tuple) and len(self.remat) > self.layers:
            raise ValueError(f"remat lists {len(self.remat)} blocks, and layers is {self.layers}")
        if self.attention == "cudnn" and self.compute_dtype != "bfloat16":
            raise ValueError("attention: cudnn needs compute_dtype: bfloat16")
        return self

    @property
    def head_dim(self) -> int:
        """Count of one head."""
        return self.embed // self.heads

    @property
    def mlp_width(self) -> int:
        """Hidden width of the SwiGLU."""
        return self.mlp or -(-8 * self.embed // 3 // 64) * 64

    def build(
        self,
        rngs: nnx.Rngs,
        *,
        vocab_size: int,
        hint: Hint = no_hint,
        platform: str | None = None,
    ) -> Gpt:
        """The module for a vocabulary of `vocab_size` tokens.

        Args:
          platform: of the devices that it will run on, as jax names it; None is not known.

        Raises:
          ConfigError: a kernel that these devices do not have.
        """
        found = self.model_copy(update={"attention": self.kernel_on(platform)})
        return Gpt(found, rngs, vocab_size=vocab_size, hint=hint)

    def kernel_on(self, platform: str | None) -> Literal["xla", "cudnn"]:
        """The kernel of attention on such devices; XLA's, which runs on all, where none is known.

        Raises:
          ConfigError: cuDNN's on other devices than GPUs.
        """
        if self.attention == "cudnn" and platform not in ("gpu", None):
            raise ConfigError(
                f"attention cudnn runs on GPUs, and the mesh is of {platform} devices; use auto, "
                "which is cuDNN's on GPUs alone"
            )
        fused = self.attention != "xla" and self.compute_dtype == "bfloat16"
        return "cudnn" if fused and platform == "gpu" else "xla"


def _even_heads(embed: int, heads: int) -> str:
    fitting = [h for h in range(1, embed // 2 + 1) if embed % (2 * h) == 0]
    near = sorted(sorted(fitting, key=lambda h: abs(h - heads))[:3])
    return " or ".join(map(str, near)) or "with an even embed"


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions (Ainslie et al., arXiv 2305.13245)."""

    def __init__(self, config: GptConfig, rngs: nnx.Rngs, hint: Hint):
        D, H, d = config.embed, config.heads, config.head_dim
        K = config.kv_heads or H
        init = nnx.initializers.normal(D**-0.5)
        out = nnx.initializers.normal(D**-0.5 / (2 * config.layers) ** 0.5)
        self.query = param(rngs, init, (D, H, d), ("embed", "heads", "head_dim"))
        self.key = param(rngs, init, (D, K, d), ("embed", "kv_heads", "head_dim"))
        self.value = param(rngs, init, (D, K, d), ("embed", "kv_heads", "head_dim"))
        self.out = param(rngs, out, (H, d, D), ("heads", "head_dim", "embed"))
        self.theta = config.rope_theta
        assert config.attention != "auto"  # `GptConfig.build` has chosen
        self.kernel: Literal["xla", "cudnn"] = config.attention
        self.hint = hint

    def __call__(self, x_BLD: jax.Array, mask_B1LL: jax.Array | None) -> jax.Array:
        """x `[B, L, D]`, mask true where a query may look (besides causality)."""
        q_BLHd = self.hint(matmul(x_BLD, self.query[...]), "batch", "seq", "heads", "head_dim")
        k_BLKd = self.hint(matmul(x_BLD, self.key[...]), "batch", "seq", "kv_heads", "head_dim")
        v_BLKd = self.hint(matmul(x_BLD, self.value[...]), "batch", "seq", "kv_heads", "head_dim")
        y_BLHd = jax.nn.dot_product_attention(
            named(rotate(q_BLHd, theta=self.theta), "query"),
            named(rotate(k_BLKd, theta=self.theta), "key"),
            named(v_BLKd, "value"),
            mask=mask_B1LL,
            is_causal=True,
            implementation=self.kernel,
        )
        flat = named(y_BLHd, "attention").reshape(*y_BLHd.shape[:2], -1)
        return matmul(flat, self.out[...].reshape(-1, self.out.shape[-1]))


class SwiGLU(nnx.Module):
    """down(silu(gate x) * up x) (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, config: GptConfig, rngs: nnx.Rngs, hint: Hint):
        D, F = config.embed, config.mlp_width
        init = nnx.initializers.normal(D**-0.5)
        down = nnx.initializers.normal(F**-0.5 / (2 * config.layers) ** 0.5)
        self.gate = param(rngs, init, (D, F), ("embed", "mlp"))
        self.up = param(rngs, init, (D, F), ("embed", "mlp"))
        self.down = param(rngs, down, (F, D), ("mlp", "embed"))
        self.hint = hint

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """x `[B, L, D]` to the same shape."""
        gate_BLF = named(matmul(x_BLD, self.gate[...]), "mlp_gate")
        h_BLF = jax.nn.silu(gate_BLF) * named(matmul(x_BLD, self.up[...]), "mlp_up")
        return matmul(self.hint(h_BLF, "batch", "seq", "mlp"), self.down[...])


class Block(nnx.Module):
    """Pre-norm residual block."""

    def __init__(self, config: GptConfig, rngs: nnx.Rngs, hint: Hint):
        self.attention_norm = RMSNorm(config.embed, rngs)
        self.attention = Attention(config, rngs, hint)
        self.mlp_norm = RMSNorm(config.embed, rngs)
        self.mlp = SwiGLU(config, rngs, hint)
        self.hint = hint

    def __call__(self, x_BLD: jax.Array, mask_B1LL: jax.Array | None) -> jax.Array:
        """x `[B, L, D]` to the same shape."""
        x_BLD = named(x_BLD, "block_input")
        h_BLD = self.hint(self.attention_norm(x_BLD), *WITHIN, was=RESIDUAL)
        y_BLD = self.attention(h_BLD, mask_B1LL)
        # Named after the hint: kept as it lies on the mesh, and not reduced over it again.
        x_BLD = x_BLD + named(self.hint(y_BLD, *RESIDUAL, was=WITHIN), "attention_out")
        h_BLD = self.hint(self.mlp_norm(x_BLD), *WITHIN, was=RESIDUAL)
        x_BLD = x_BLD + self.hint(self.mlp(h_BLD), *RESIDUAL, was=WITHIN)
        return self.hint(x_BLD, *RESIDUAL)


class Gpt(Stacked):
    """Tokens int32 `[B, L]` to logits `[B, L, V]` (V padded) of the token after each position.

    Called with segments int32 `[B, L]` besides, the document of each position, it keeps documents
    apart where `isolate_documents` says so.
    """

    def __init__(self, config: GptConfig, rngs: nnx.Rngs, *, vocab_size: int, hint: Hint):
        self.config, self.hint = config, hint
        self.vocab_size = vocab_size
        self.remat, self.unroll = config.remat, config.scan_unroll
        D, V = config.embed, -(-vocab_size // config.vocab_multiple) * config.vocab_multiple
        init = nnx.initializers.normal(0.02)
        self.embedding = param(rngs, init, (V, D), ("vocab", "embed"))
        self.blocks = stack(lambda r: Block(config, r, hint), config.layers, rngs)
        self.norm = RMSNorm(D, rngs)
        if not config.tied_head:
            self.output = param(rngs, init, (D, V), ("embed", "vocab"))

    def embed(self, tokens_BL: jax.Array, segments_BL: jax.Array | None = None) -> jax.Array:
        """Tokens `[B, L]` to `[B, L, D]` in the compute dtype; segments change nothing."""
        del segments_BL
        x_BLD = self.embedding[...][tokens_BL].astype(jnp.dtype(self.config.compute_dtype))
        return self.hint(self.hint(x_BLD, *WITHIN), *RESIDUAL, was=WITHIN)

    def operands(
        self, tokens_BL: jax.Array, segments_BL: jax.Array | None = None
    ) -> tuple[jax.Array | None]:
        """True where a query may look (besides causality); None is everywhere."""
        del tokens_BL
        if not self.config.isolate_documents or segments_BL is None:
            return (None,)
        return ((segments_BL[:, :, None] == segments_BL[:, None, :])[:, None],)

    def head(self, x_BLD: jax.Array) -> jax.Array:
        """Final norm and logits `[B, L, V]` in the compute dtype."""
        table = self.embedding[...].T if self.config.tied_head else self.output[...]
        h_BLD = self.hint(self.norm(x_BLD), *WITHIN, was=RESIDUAL)
        return self.hint(matmul(h_BLD, table), "batch", "seq", "vocab")
