"""A decoder with RMSNorm, rotary positions, SwiGLU, grouped-query attention and a scan over layers.

The options of its config cover the decoders of published families
(`jaxdist.interchange.families`).

Dims: B batch, L sequence, D embed, H heads, K kv_heads, d head_dim, F mlp, V vocab.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field, field_validator, model_validator

from jaxdist.config.schema import Count
from jaxdist.errors import ConfigError
from jaxdist.models.attention.choose import Attend, choose_kernel, kernel_refusal
from jaxdist.models.attention.config import TransformerConfig, check_positions
from jaxdist.models.attention.contract import AttentionRequest, Qkv
from jaxdist.models.feed_forward.config import ExpertsConfig
from jaxdist.models.feed_forward.mixture import Mixture
from jaxdist.models.feed_forward.stack import Routed, RoutedStack
from jaxdist.models.feed_forward.swiglu import Mlp, SwiGLU
from jaxdist.models.fences import Pass, fence
from jaxdist.models.hints import RESIDUAL, WITHIN, Hint, no_hint
from jaxdist.models.layers import LayerNorm, RMSNorm, biased, matmul, param, stack
from jaxdist.models.remat import RematConfig, named
from jaxdist.models.rotary import RopeScaling, rotate
from jaxdist.models.vocabulary import cut_padding, filled_up, hide_padding, padded_size

Biases = Literal["none", "qkv", "attention", "all"]
Norm = Literal["rms", "rms_offset", "layer"]


class GptConfig(TransformerConfig):
    """A decoder-only transformer for next-token prediction."""

    type: Literal["gpt"]
    """The name that selects this model in a config."""
    heads: Count
    """The number of query heads. Without head_size, embed / heads must be an even number."""
    head_size: Count | None = None
    """The width of a head, which must be even; null means embed / heads."""
    kv_heads: Count | None = None
    """The number of key and value heads, each of which a group of query heads shares. null gives
    every query head its own key and value head."""
    mlp: Count | None = None
    """The hidden width of the MLP; null means 8/3 of embed, rounded up to a multiple of 64."""
    vocab_multiple: Count = 64
    """The number to whose multiple the embedding table is padded, so that a mesh axis can divide
    the table. The padding is zero, has probability 0 and is not trained, so it does not change
    losses."""
    tied_head: bool = True
    """Whether to use the embedding table as the output head as well."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """The base of the frequencies of the rotary positions. Models for long sequences use a larger
    value."""
    rope_scaling: RopeScaling | None = None
    """The change of the rotary frequencies for longer sequences, selected by its `type`; null
    changes nothing."""
    positions: Count | None = None
    """The number of learned positions, which replace rotary positions; null keeps rotary positions.
    """
    norm: Norm = "rms"
    """The norm: rms, rms_offset (which stores its scales minus 1), or layer (with biases)."""
    mlp_type: Mlp = "swiglu"
    """The kind of MLP: swiglu, geglu (gated by the tanh form of gelu), gelu (the tanh form without
    a gate), or gelu_erf (the exact form without a gate)."""
    biases: Biases = "none"
    """The products with a bias: none, qkv (query, key and value), attention (also attention's
    output), or all (also the MLP's products)."""
    qk_norm: bool = False
    """Whether to normalize the features of each head of queries and keys, before the rotation."""
    scale_embeddings: bool = False
    """Whether to multiply embeddings by the square root of their width."""
    experts: ExpertsConfig | None = None
    """A mixture of experts, which replaces the MLP of some or all blocks; null uses no experts."""
    isolate_documents: bool = False
    """Whether to block attention between the documents that are packed in a window."""
    attention_window: Count | None = None
    """The number of earlier positions to which each position attends; null means all earlier
    positions."""
    remat: RematConfig | Annotated[tuple[RematConfig, ...], Field(min_length=1)] = "none"
    """The activations that the backward pass recomputes. `none` recomputes nothing. `elementwise`
    recomputes the cheap operations (rotations, products, masks), `dots` recomputes everything
    except the results of matmuls, and `full` recomputes whole blocks. A preset keeps its
    activations and recomputes all others. A mapping such as `{query: save, attention: offload}`
    names the activations to keep on the device (save) or in the host's memory (offload), and all
    others are recomputed. A list has an entry for each of several consecutive blocks, and is
    repeated over the layers: `[full, none]` recomputes every other block. In a pipeline, each chunk
    begins with the first entry of the list."""

    @model_validator(mode="after")
    def _check(self) -> GptConfig:
        if self.head_size is not None and self.head_size % 2:
            raise ValueError(
                f"head_size {self.head_size} must be even, because rotary positions rotate pairs "
                "of elements"
            )
        if not self.head_size and (self.embed % self.heads or (self.embed // self.heads) % 2):
            raise ValueError(
                f"embed {self.embed} over heads {self.heads} must give an even head size: "
                f"use heads {_even_heads(self.embed, self.heads)}"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        if self.positions is not None and self.rope_scaling is not None:
            raise ValueError(
                "rope_scaling has no effect with learned positions: leave out rope_scaling or "
                "positions"
            )
        if self.experts is not None:
            self._check_experts(self.experts)
        if isinstance(self.remat, tuple) and len(self.remat) > self.layers:
            raise ValueError(
                f"remat lists {len(self.remat)} blocks, but layers is "
                f"{self.layers}: list one entry for each layer"
            )
        refused = kernel_refusal(self.attention, self.ask())
        if refused is not None:
            raise ValueError(refused)
        return self

    def _check_experts(self, experts: ExpertsConfig) -> None:
        if self.layers % experts.every:
            near = max(n for n in range(1, experts.every + 1) if self.layers % n == 0)
            raise ValueError(
                f"model.experts.every {experts.every} must divide layers {self.layers}: use {near}"
            )
        if self.biases == "all":
            raise ValueError(
                "experts have no biases, so biases: all cannot be used: set biases: attention"
            )
        if isinstance(self.remat, tuple) and experts.every > 1:
            raise ValueError(
                f"model.experts.every {experts.every} computes {experts.every} blocks together, "
                "but a list of remat has a policy for each block: use a single policy"
            )

    @field_validator("attention", mode="before")
    @classmethod
    def _check_kernel(cls, name: Any) -> Any:
        if name == "xla":
            raise ValueError(
                "attention xla is unknown: the attention that XLA compiles is called plain; set "
                "attention: plain"
            )
        return name

    @property
    def head_dim(self) -> int:
        """The width of an attention head."""
        return self.head_size or self.embed // self.heads

    @property
    def mlp_width(self) -> int:
        """The hidden width of the MLP."""
        return self.mlp or -(-8 * self.embed // 3 // 64) * 64

    def masked_flops(self, batch: int, length: int) -> float:
        """Return the FLOPs in a training step for scores that the causal mask hides.

        In each layer, attention has 2 products in the forward pass and 4 products in the backward
        pass. With H heads of width d, a product has 2 * batch * length^2 * H * d FLOPs. The mask
        hides half of these FLOPs.
        """
        return 0.5 * 6 * 2 * batch * length**2 * self.heads * self.head_dim * self.layers

    def build(
        self,
        rngs: nnx.Rngs,
        *,
        vocab_size: int,
        hint: Hint = no_hint,
        platform: str | None = None,
        length: int | None = None,
        family: str = "",
    ) -> Gpt:
        """Build the module for a vocabulary of `vocab_size` tokens.

        Args:
          rngs: the random streams for the initial values.
          hint: the layout of activations on the mesh.
          platform: the platform of the devices, as jax names it, or None if it is unknown.
          length: the length of the sequences, or None if it is unknown.
          family: the short name of the devices, such as v5e; "" means unknown.

        Raises:
          ConfigError: the attention kernel does not support these devices or sequences; the
            sequences are longer than the learned positions; the MLP has biases or experts, but
            `hint.ring` overlaps its products.
        """
        ask = self.ask(platform, hint, length, family)
        choose_kernel(self.attention, ask)
        check_positions(self.positions, length)
        if hint.ring is not None and self.biases == "all":
            raise ConfigError(
                "sharding.collective_matmul computes an MLP without biases, but model.biases: all "
                "gives it biases; set sharding.collective_matmul: false",
                setting=("biases",),
            )
        if hint.ring is not None and self.experts is not None:
            raise ConfigError(
                "sharding.collective_matmul overlaps the products of an MLP, but model.experts "
                "replaces the MLP by experts: set sharding.collective_matmul: false",
                setting=("experts",),
            )
        attend = Attend(self.attention, ask, hint)
        return Gpt(self, rngs, vocab_size=vocab_size, hint=hint, attend=attend)

    def ask(
        self,
        platform: str | None = None,
        hint: Hint = no_hint,
        length: int | None = None,
        family: str = "",
    ) -> AttentionRequest:
        """Return this model's request to an attention kernel.

        The arguments are the arguments of `build`.
        """
        return AttentionRequest(
            platform,
            self.compute_dtype,
            heads=self.heads,
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim,
            window=self.attention_window,
            segments=self.isolate_documents,
            length=length,
            head_parts=hint.parts("heads"),
            kv_head_parts=hint.parts("kv_heads"),
            seq_parts=hint.parts("seq") if hint.split is None else 1,
            family=family,
        )


def _even_heads(embed: int, heads: int) -> str:
    fitting = [h for h in range(1, embed // 2 + 1) if embed % (2 * h) == 0]
    near = sorted(sorted(fitting, key=lambda h: abs(h - heads))[:3])
    return " or ".join(map(str, near)) or "with an even embed"


def _norm(config: GptConfig, rngs: nnx.Rngs, size: int, dim: str = "embed") -> RMSNorm | LayerNorm:
    if config.norm == "layer":
        return LayerNorm(size, rngs, epsilon=config.norm_epsilon, dim=dim)
    offset = 1.0 if config.norm == "rms_offset" else 0.0
    return RMSNorm(size, rngs, epsilon=config.norm_epsilon, dim=dim, offset=offset)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions (Ainslie et al., arXiv 2305.13245)."""

    def __init__(self, config: GptConfig, rngs: nnx.Rngs, hint: Hint, attend: Attend):
        D, H, d = config.embed, config.heads, config.head_dim
        K = config.kv_heads or H
        init = nnx.initializers.normal(D**-0.5)
        out = nnx.initializers.normal(D**-0.5 / (2 * config.layers) ** 0.5)
        self.query = param(rngs, init, (D, H, d), ("embed", "heads", "head_dim"))
        self.key = param(rngs, init, (D, K, d), ("embed", "kv_heads", "head_dim"))
        self.value = param(rngs, init, (D, K, d), ("embed", "kv_heads", "head_dim"))
        self.out = param(rngs, out, (H, d, D), ("heads", "head_dim", "embed"))
        if config.biases != "none":
            zeros = nnx.initializers.zeros
            self.query_bias = param(rngs, zeros, (H, d), ("heads", "head_dim"))
            self.key_bias = param(rngs, zeros, (K, d), ("kv_heads", "head_dim"))
            self.value_bias = param(rngs, zeros, (K, d), ("kv_heads", "head_dim"))
        if config.biases in ("attention", "all"):
            self.out_bias = param(rngs, nnx.initializers.zeros, (D,), ("embed",))
        if config.qk_norm:
            self.query_norm = _norm(config, rngs, d, "head_dim")
            self.key_norm = _norm(config, rngs, d, "head_dim")
        self.config = config
        self.attend, self.hint = attend, hint
        self.on_tpu = attend.ask.platform == "tpu"

    def __call__(
        self, x_BLD: jax.Array, segments_BL: jax.Array | None, positions_BL: jax.Array | None = None
    ) -> jax.Array:
        """Return the result `[B, L, D]` of attention within x `[B, L, D]`.

        Args:
          segments_BL: the document number of each position, or None if each sequence is a single
            document.
          positions_BL: the position of each token, if tokens are in the order of the hint's split;
            None means 0..L-1.
        """
        q_BLHd, k_BLKd, v_BLKd = (
            self.hint(self._project(x_BLD, name), "batch", "seq", heads, "head_dim")
            for name, heads in (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))
        )
        if self.config.qk_norm:
            q_BLHd, k_BLKd = self.query_norm(q_BLHd), self.key_norm(k_BLKd)
        if self.config.positions is None:
            theta, scaling = self.config.rope_theta, self.config.rope_scaling
            turn = partial(rotate, theta=theta, scaling=scaling, by_product=self.on_tpu)
            at = self.attend.at if positions_BL is None else (positions_BL, x_BLD.shape[1])
            q_BLHd, k_BLKd = (turn(x, at=at) for x in (q_BLHd, k_BLKd))
        qkv = named(q_BLHd, "query"), named(k_BLKd, "key"), named(v_BLKd, "value")
        attend = self.attend if positions_BL is None else self.attend.reordered
        y_BLHd = attend(Qkv(*qkv, segments_BL))
        y_BLHd = fence(y_BLHd, "backward" if self.on_tpu else "none")
        if self.on_tpu:
            out_BLD = jnp.tensordot(y_BLHd, self.out[...].astype(y_BLHd.dtype), 2)
        else:
            flat = y_BLHd.reshape(*y_BLHd.shape[:2], -1)
            out_BLD = matmul(flat, self.out[...].reshape(-1, self.out.shape[-1]))
        return biased(out_BLD, getattr(self, "out_bias", None))

    def _project(self, x_BLD: jax.Array, name: str) -> jax.Array:
        """Project x `[B, L, D]` to the heads of queries, keys or values."""
        kernel: nnx.Param = getattr(self, name)
        if self.on_tpu:
            # If rows are not flattened, XLA:TPU computes heads in the kernel's layout, without a
            # copy.
            y_BLHd = jnp.tensordot(x_BLD, kernel[...].astype(x_BLD.dtype), 1)
        else:
            y_BLHd = matmul(x_BLD, kernel[...])
        return biased(y_BLHd, getattr(self, f"{name}_bias", None))


class Block(nnx.Module):
    """A pre-norm residual block of attention and an MLP."""

    def __init__(self, config: GptConfig, rngs: nnx.Rngs, hint: Hint, attend: Attend):
        self.attention_norm = _norm(config, rngs, config.embed)
        self.attention = Attention(config, rngs, hint, attend)
        self.mlp_norm = _norm(config, rngs, config.embed)
        on_tpu = attend.ask.platform == "tpu"
        self.mlp = self._feed_forward(config, rngs, hint, attend.ask.platform)
        self.hint = hint
        self.after_norms: Pass = "backward" if on_tpu else "none"

    def _feed_forward(
        self, config: GptConfig, rngs: nnx.Rngs, hint: Hint, platform: str | None
    ) -> nnx.Module:
        return SwiGLU(config, rngs, hint, fences="both" if platform == "tpu" else "none")

    def __call__(
        self, x_BLD: jax.Array, segments_BL: jax.Array | None, positions_BL: jax.Array | None = None
    ) -> jax.Array:
        """Map the residual stream x `[B, L, D]` to the same shape.

        The other arguments are the arguments of `Attention`.
        """
        x_BLD = self._attended(x_BLD, segments_BL, positions_BL)
        with jax.named_scope("mlp"):
            x_BLD = x_BLD + self.mlp(fence(self.mlp_norm(x_BLD), self.after_norms))
        return self.hint(x_BLD, *RESIDUAL)

    def _attended(
        self, x_BLD: jax.Array, segments_BL: jax.Array | None, positions_BL: jax.Array | None = None
    ) -> jax.Array:
        x_BLD = named(x_BLD, "block_input")
        # The compiled program has the scope in the names of its operations, so that `inspect` can
        # show to which layer an expensive operation belongs.
        with jax.named_scope("attention"):
            h_BLD = fence(self.attention_norm(x_BLD), self.after_norms)
            h_BLD = self.hint(h_BLD, *WITHIN, was=RESIDUAL)
            y_BLD = self.attention(h_BLD, segments_BL, positions_BL)
            # The name is given after the hint, so that remat saves the value in its final layout,
            # and the backward pass does not repeat the reduction.
            return x_BLD + named(self.hint(y_BLD, *RESIDUAL, was=WITHIN), "attention_out")


class ExpertsBlock(Block):
    """A pre-norm residual block with experts, after `experts.every` - 1 blocks without experts."""

    def __init__(self, config: GptConfig, rngs: nnx.Rngs, hint: Hint, attend: Attend):
        every = 1 if config.experts is None else config.experts.every
        self.before = nnx.List([Block(config, rngs, hint, attend) for _ in range(every - 1)])
        super().__init__(config, rngs, hint, attend)

    def _feed_forward(
        self, config: GptConfig, rngs: nnx.Rngs, hint: Hint, platform: str | None
    ) -> nnx.Module:
        assert config.experts is not None
        return Mixture(config, config.experts, rngs, hint, platform)

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        carried: Routed,
        segments_BL: jax.Array | None,
        positions_BL: jax.Array | None,
        weight_BL: jax.Array,
    ) -> Routed:
        """Return the residual stream and the routers' statistics after this block.

        Args:
          carried: the residual stream `[B, L, D]` and the statistics before this block.
          weight_BL: the weight of each token in the loss.
        """
        x_BLD, statistics = carried
        for block in self.before:
            x_BLD = block(x_BLD, segments_BL, positions_BL)
        x_BLD = self._attended(x_BLD, segments_BL, positions_BL)
        with jax.named_scope("experts"):
            h_BLD = fence(self.mlp_norm(x_BLD), self.after_norms)
            y_BLD, statistics = self.mlp(h_BLD, weight_BL, statistics, positions_BL)
        return self.hint(x_BLD + y_BLD, *RESIDUAL), statistics


class Gpt(RoutedStack):
    """A model from tokens int32 `[B, L]` to logits `[B, L, vocab_size]` of each next token.

    Two further inputs are optional: segments int32 `[B, L]`, the document number of each position,
    and positions int32 `[1, L]`, the position of each token in the sequence, if tokens are in the
    order of the hint's split. With `isolate_documents`, attention does not cross documents.
    """

    def __init__(
        self, config: GptConfig, rngs: nnx.Rngs, *, vocab_size: int, hint: Hint, attend: Attend
    ):
        self.config, self.hint, self.experts = config, hint, config.experts
        self.vocab_size = vocab_size
        self.remat, self.unroll = config.remat, config.scan_unroll
        D = config.embed
        V = padded_size(vocab_size, config.vocab_multiple)
        self.embedding = param(rngs, filled_up(vocab_size, D), (V, D), ("vocab", "embed"))
        kind, every = Block, 1
        if config.experts is not None:
            kind, every = ExpertsBlock, config.experts.every
            self.routers = config.layers // every
        self.blocks = stack(lambda r: kind(config, r, hint, attend), config.layers // every, rngs)
        self.norm = _norm(config, rngs, D)
        if not config.tied_head:
            self.output = param(rngs, filled_up(D, vocab_size), (D, V), ("embed", "vocab"))
        if config.positions is not None:
            normal = nnx.initializers.normal(0.02)
            self.positions = param(rngs, normal, (config.positions, D), (None, "embed"))

    def embed(
        self,
        tokens_BL: jax.Array,
        segments_BL: jax.Array | None = None,
        positions_BL: jax.Array | None = None,
        *,
        at_BL: jax.Array | None = None,
    ) -> jax.Array:
        """Embed tokens `[B, L]` as `[B, L, D]`.

        Args:
          at_BL: the index of each token's learned position; None takes `positions_BL`, or 0..L-1 if
            `positions_BL` is None too.
        """
        del segments_BL
        with jax.named_scope("embed"):
            x_BLD = self.embedding[...][tokens_BL].astype(jnp.dtype(self.config.compute_dtype))
            if self.config.scale_embeddings:
                x_BLD = x_BLD * jnp.asarray(self.config.embed**0.5, x_BLD.dtype)
            if self.config.positions is not None:
                at_BL = positions_BL if at_BL is None else at_BL
                table, length = self.positions[...], tokens_BL.shape[1]
                own_BLD = table[:length][None] if at_BL is None else table[at_BL]
                x_BLD = x_BLD + own_BLD.astype(x_BLD.dtype)
        return self.hint(self.hint(x_BLD, *WITHIN), *RESIDUAL, was=WITHIN)

    def operands(
        self,
        tokens_BL: jax.Array,
        segments_BL: jax.Array | None = None,
        positions_BL: jax.Array | None = None,
    ) -> tuple[jax.Array | None, ...]:
        """Return the documents and the positions, which are the arguments of the blocks after x.

        The documents are None unless the model isolates documents. The positions are None if tokens
        are in the order of the text.
        """
        del tokens_BL
        return segments_BL if self.config.isolate_documents else None, positions_BL

    def head(self, x_BLD: jax.Array) -> jax.Array:
        """Apply the final norm and return logits `[B, L, vocab_size]` in the compute dtype."""
        return cut_padding(self.padded_head(x_BLD), self.vocab_size, self.hint)

    def padded_head(self, x_BLD: jax.Array) -> jax.Array:
        """Apply the final norm; return logits `[B, L, V]`, where padding has probability 0."""
        table = self.embedding[...].T if self.config.tied_head else self.output[...]
        with jax.named_scope("head"):
            h_BLD = self.hint(self.norm(x_BLD), *WITHIN, was=RESIDUAL)
            logits_BLV = self.hint(matmul(h_BLD, table), "batch", "seq", "vocab")
            return hide_padding(logits_BLV, self.vocab_size)
