"""BERT: an encoder without causality, with a head for masked tokens (Devlin, arXiv 1810.04805).

A second head classifies sequences by the state of their first token.

Dims: B batch, L sequence, D embed, V vocab, P predicted positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from pydantic import Field, model_validator

from jaxdist.config.schema import Count
from jaxdist.errors import ConfigError
from jaxdist.models.attention.choose import Attend, choose_kernel
from jaxdist.models.attention.config import TransformerConfig, check_positions
from jaxdist.models.attention.contract import AttentionRequest
from jaxdist.models.feed_forward.swiglu import SwiGLU
from jaxdist.models.gpt import Attention, GptConfig
from jaxdist.models.hints import RESIDUAL, WITHIN, Hint, no_hint
from jaxdist.models.layers import LayerNorm, Linear, Stacked, matmul, param, stack
from jaxdist.models.remat import RematConfig, named
from jaxdist.models.vocabulary import cut_padding, filled_up, hide_padding, padded_size

_INIT = nnx.initializers.normal(0.02)


class EncoderConfig(TransformerConfig):
    """The settings of a model whose tokens attend to all tokens."""

    heads: Count
    """The number of attention heads, which must divide embed."""
    mlp: Count | None = None
    """The hidden width of the MLP; null means 4 times embed."""
    remat: RematConfig = "none"
    """The activations that the backward pass recomputes; see the same setting of gpt."""

    @model_validator(mode="after")
    def _check_heads(self) -> EncoderConfig:
        if self.embed % self.heads:
            fitting = [n for n in range(1, self.embed + 1) if self.embed % n == 0]
            near = min(fitting, key=lambda n: abs(n - self.heads))
            raise ValueError(f"heads {self.heads} must divide embed {self.embed}: use {near}")
        return self

    def block_of(self, **more: Any) -> GptConfig:
        """Return the `GptConfig` of a block with the settings of this model and `more` settings."""
        return GptConfig.model_construct(
            type="gpt",
            layers=self.layers,
            embed=self.embed,
            heads=self.heads,
            mlp=self.mlp or 4 * self.embed,
            mlp_type="gelu_erf",
            biases="all",
            compute_dtype=self.compute_dtype,
            **more,
        )


class BertConfig(EncoderConfig):
    """An encoder for masked tokens, or for classes of sequences.

    A norm follows each residual sum, positions are learned, and gelu has its exact form.
    BERT-base has layers 12, embed 768, heads 12; BERT-large has layers 24, embed 1024, heads 16.
    """

    type: Literal["bert"]
    """The name that selects this model in a config."""
    head: Literal["tokens", "classes"] = "tokens"
    """The output of the model. tokens predicts the originals of masked tokens. classes predicts a
    class for each sequence: two dense layers, with tanh between them, compute it from the state of
    the first token."""
    positions: Count = 512
    """The number of learned positions, which is the largest length of a sequence."""
    token_types: Count = 2
    """The number of kinds of tokens (first and second sentence). All tokens of data without kinds
    have the first kind."""
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-12
    """The number that norms add to a variance before they divide by the square root."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The fraction of the embeddings and of the residual branches that training sets to zero. The
    paper uses 0.1; 0 drops nothing."""
    vocab_multiple: Count = 64
    """The number to whose multiple the embedding table is padded, so that a mesh axis can divide
    the table. See the same setting of gpt.
    """
    isolate_documents: bool = False
    """Whether to block attention between the documents that are packed in a window, and to padding.
    The positions of each document then start at 0."""

    def block(self) -> GptConfig:
        """Return the `GptConfig` from which the attention and the MLP of each block are built."""
        return self.block_of(positions=self.positions, isolate_documents=self.isolate_documents)

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
        return replace(self.block().ask(platform, hint, length, family), causal=False)

    def build(
        self,
        rngs: nnx.Rngs,
        *,
        vocab_size: int,
        hint: Hint = no_hint,
        platform: str | None = None,
        length: int | None = None,
        family: str = "",
        classes: int | None = None,
    ) -> Bert | BertClassifier:
        """Build the module for a vocabulary of `vocab_size` tokens.

        Args:
          hint, platform, length, family: see `GptConfig.build`.
          classes: the number of the data's classes, for `head: classes`, or None if the data has no
            labels.

        Raises:
          ConfigError: the attention kernel does not support these devices or sequences; the
            sequences are longer than the learned positions; the head is for classes, but the
            data has none.
        """
        if self.head == "classes" and classes is None:
            raise ConfigError(
                "model.head: classes needs data with classes, such as data.type: labelled_text",
                setting=("head",),
            )
        ask = self.ask(platform, hint, length, family)
        choose_kernel(self.attention, ask)
        check_positions(self.positions, length)
        attend = Attend(self.attention, ask, hint)
        given = {"vocab_size": vocab_size, "hint": hint, "attend": attend}
        if self.head == "tokens":
            return Bert(self, rngs, **given)
        return BertClassifier(self, rngs, **given, classes=classes or 0)


class Encoder(nnx.Module):
    """A block of the encoder: attention, then an MLP, with a norm after each residual sum."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs, hint: Hint, attend: Attend):
        block = config.block()
        self.attention = Attention(block, rngs, hint, attend)
        self.attention_norm = LayerNorm(config.embed, rngs, epsilon=config.norm_epsilon)
        self.mlp = SwiGLU(block, rngs, hint)
        self.mlp_norm = LayerNorm(config.embed, rngs, epsilon=config.norm_epsilon)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None
        self.hint = hint

    def __call__(self, x_BLD: jax.Array, segments_BL: jax.Array | None) -> jax.Array:
        """Map the residual stream x `[B, L, D]` to the same shape."""
        x_BLD = named(x_BLD, "block_input")
        with jax.named_scope("attention"):
            y_BLD = self.attention(self.hint(x_BLD, *WITHIN, was=RESIDUAL), segments_BL)
            y_BLD = named(self.hint(y_BLD, *RESIDUAL, was=WITHIN), "attention_out")
            x_BLD = self.attention_norm(x_BLD + _dropped(y_BLD, self.dropout))
        with jax.named_scope("mlp"):
            x_BLD = self.mlp_norm(x_BLD + _dropped(self.mlp(x_BLD), self.dropout))
        return self.hint(x_BLD, *RESIDUAL)


def _positions(segments_BL: jax.Array) -> jax.Array:
    """Return the position of each token within its document, int32 `[B, L]`.

    >>> _positions(jnp.array([[1, 1, 2, 2, 2, 0]])).tolist()
    [[0, 1, 0, 1, 2, 0]]
    """
    index_BL = jnp.broadcast_to(jnp.arange(segments_BL.shape[1]), segments_BL.shape)
    begins = jnp.diff(segments_BL, axis=1, prepend=segments_BL[:, :1]) != 0
    return index_BL - jax.lax.cummax(jnp.where(begins, index_BL, 0), axis=1)


def _dropped(x: jax.Array, dropout: nnx.Dropout | None) -> jax.Array:
    return x if dropout is None else dropout(x)


class BertEncoder(Stacked):
    """An encoder of tokens int32 `[B, L]`, without a head.

    Two further inputs are optional: segments int32 `[B, L]`, the document number of each position,
    and kinds int32 `[B, L]`, the kind of each token. `hidden` returns the states `[B, L, D]`.
    """

    def __init__(
        self, config: BertConfig, rngs: nnx.Rngs, *, vocab_size: int, hint: Hint, attend: Attend
    ):
        self.config, self.hint, self.vocab_size = config, hint, vocab_size
        self.remat, self.unroll = config.remat, config.scan_unroll
        D, V = config.embed, padded_size(vocab_size, config.vocab_multiple)
        epsilon = config.norm_epsilon
        self.embedding = param(rngs, filled_up(vocab_size, D), (V, D), ("vocab", "embed"))
        self.positions = param(rngs, _INIT, (config.positions, D), (None, "embed"))
        self.kinds = param(rngs, _INIT, (config.token_types, D), (None, "embed"))
        self.embed_norm = LayerNorm(D, rngs, epsilon=epsilon)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs) if config.dropout else None
        self.blocks = stack(lambda r: Encoder(config, r, hint, attend), config.layers, rngs)

    def embed(
        self,
        tokens_BL: jax.Array,
        segments_BL: jax.Array | None = None,
        kinds_BL: jax.Array | None = None,
    ) -> jax.Array:
        """Embed tokens `[B, L]` as `[B, L, D]` in the compute dtype."""
        with jax.named_scope("embed"):
            kinds = self.kinds[...]
            # For data without kinds, the addition of row 0 is cheaper than a gather of this row at
            # each position.
            kind_BLD = kinds[:1][None] if kinds_BL is None else kinds[kinds_BL]
            table = self.positions[...]
            if self.config.isolate_documents and segments_BL is not None:
                place_BLD = table[_positions(segments_BL)]
            else:
                place_BLD = table[: tokens_BL.shape[1]][None]
            x_BLD = self.embedding[...][tokens_BL] + place_BLD + kind_BLD
            x_BLD = self.embed_norm(x_BLD.astype(jnp.dtype(self.config.compute_dtype)))
            x_BLD = _dropped(x_BLD, self.dropout)
        return self.hint(self.hint(x_BLD, *WITHIN), *RESIDUAL, was=WITHIN)

    def operands(
        self,
        tokens_BL: jax.Array,
        segments_BL: jax.Array | None = None,
        kinds_BL: jax.Array | None = None,
    ) -> tuple[jax.Array | None]:
        """Return the segments for the blocks, or None if documents are not isolated."""
        del tokens_BL, kinds_BL
        return (segments_BL if self.config.isolate_documents else None,)


class Bert(BertEncoder):
    """A model from masked tokens int32 `[B, L]` to logits `[B, L, vocab_size]` of the originals.

    `head` also accepts the states of only some positions.
    """

    def __init__(self, config: BertConfig, rngs: nnx.Rngs, **encoder: Any):
        super().__init__(config, rngs, **encoder)
        (V, D), zeros = self.embedding.shape, nnx.initializers.zeros
        self.transform = param(rngs, _INIT, (D, D), ("embed", None))
        self.transform_bias = param(rngs, zeros, (D,), ("embed",))
        self.norm = LayerNorm(D, rngs, epsilon=config.norm_epsilon)
        self.output_bias = param(rngs, zeros, (V,), ("vocab",))

    def head(self, x_BLD: jax.Array) -> jax.Array:
        """Return logits `[B, L, vocab_size]` of states x `[B, L, D]`, in the compute dtype."""
        return cut_padding(self.padded_head(x_BLD), self.vocab_size, self.hint)

    def padded_head(self, x_BPD: jax.Array) -> jax.Array:
        """Return logits `[B, P, V]`; the padding of the vocabulary has probability 0."""
        with jax.named_scope("head"):
            # An axis that splits the sequence splits the few predicted positions too, but only if
            # the number of parts divides the number of these positions.
            split = x_BPD.shape[1] % self.hint.parts("residual_seq") == 0
            if split:
                x_BPD = self.hint(x_BPD, *WITHIN, was=RESIDUAL)
            else:
                x_BPD = self.hint(x_BPD, "batch", None, "embed")
            bias_D = self.transform_bias[...].astype(x_BPD.dtype).reshape(1, 1, -1)
            h_BPD = jax.nn.gelu(matmul(x_BPD, self.transform[...]) + bias_D, approximate=False)
            logits_BPV = matmul(self.norm(h_BPD), self.embedding[...].T)
            bias_V = self.output_bias[...].astype(x_BPD.dtype).reshape(1, 1, -1)
            seq = "seq" if split else None
            logits_BPV = self.hint(logits_BPV + bias_V, "batch", seq, "vocab")
            return hide_padding(logits_BPV, self.vocab_size)


class BertClassifier(BertEncoder):
    """A model from tokens int32 `[B, L]` to logits `[B, classes]` of each sequence."""

    def __init__(self, config: BertConfig, rngs: nnx.Rngs, *, classes: int, **encoder: Any):
        super().__init__(config, rngs, **encoder)
        D = config.embed
        self.pooler = Linear((D, D), ("embed", "features"), rngs, init=_INIT)
        self.classifier = Linear((D, classes), ("features", "classes"), rngs, init=_INIT)

    def head(self, x_BLD: jax.Array) -> jax.Array:
        """Return logits `[B, classes]`, from the state of each sequence's first token.

        Args:
          x_BLD: the states of the encoder.
        """
        with jax.named_scope("head"):
            x_BD = self.hint(x_BLD, *WITHIN, was=RESIDUAL)[:, 0]
            h_BD = _dropped(jnp.tanh(self.pooler(x_BD)), self.dropout)
            return self.classifier(h_BD)
