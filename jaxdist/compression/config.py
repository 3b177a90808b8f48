"""The config section of compressed gradients: a codec, chosen by its `type`, and other settings."""

from __future__ import annotations

from collections.abc import Mapping
from glob import escape
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field, model_validator

from jaxdist.collectives.contract import Algorithm
from jaxdist.compression.auto import AutoCodec, resolve
from jaxdist.compression.choice import CodecRule, PerParameter, Stages, sparsity_warm_up, warm_up
from jaxdist.compression.codecs.adaptive import Adaptive
from jaxdist.compression.codecs.build import CodecConfig
from jaxdist.compression.codecs.cast import Cast
from jaxdist.compression.codecs.chain import Chain
from jaxdist.compression.codecs.lowrank import LowRank
from jaxdist.compression.codecs.quantize import Quantize
from jaxdist.compression.codecs.randomk import RandomK
from jaxdist.compression.codecs.sign import Sign
from jaxdist.compression.codecs.topk import TopK
from jaxdist.compression.codecs.whole import WholeCodec
from jaxdist.compression.contract import Codec
from jaxdist.compression.feedback.build import FeedbackConfig
from jaxdist.compression.feedback.classic import CLASSIC
from jaxdist.compression.feedback.contract import Feedback
from jaxdist.compression.feedback.none import NoFeedback
from jaxdist.config.schema import Config
from jaxdist.errors import CompressionError
from jaxdist.trees import flatten_with_names
from jaxdist.types import Grads, PyTree


class Compression(Config):
    """The settings of compressed gradients that do not depend on the codec."""

    error_feedback: bool | FeedbackConfig = True
    """The error feedback, which adds the error of a message to a later message. true selects
    classic feedback, false turns feedback off, and a mapping selects another feedback by its
    `type`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The number of steps of the warm-up, in which messages are compressed less than later, or not
    at all. 0 compresses from the first step."""
    warmup: Literal["whole", "sparser"] = "whole"
    """The messages in the warm-up. With `whole`, gradients are sent uncompressed. With `sparser`,
    which works only with topk, equal parts of the warm-up send 25%, 6.25%, 1.6% and 0.4% of the
    elements."""
    axis: Literal["data", "data.dcn"] = "data"
    """The axis over which messages are sent: all devices that share the batch (data), or only the
    slow network (data.dcn)."""
    rules: tuple[CodecRule, ...] = ()
    """The codecs of the parameters whose names match patterns. If several rules match a name, the
    first of these rules is used."""
    vectors: Literal["whole", "otherwise"] = "whole"
    """The codec of parameters with fewer than two dims (norms, biases): `whole` sends them
    uncompressed, and `otherwise` compresses them like matrices."""

    @model_validator(mode="after")
    def _fits(self) -> Compression:
        if self.warmup == "sparser" and (not isinstance(self, TopK) or not self.warmup_steps):
            raise ValueError(
                "warmup: sparser works only with type: topk and warmup_steps above 0; set both, "
                "or leave warmup out"
            )
        try:
            for codec in self.codecs:
                self.feedback.check(codec)
        except CompressionError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def codecs(self) -> tuple[CodecConfig, ...]:
        """The codecs that a run may use: the single codec, or the candidates of `auto`."""
        return (self.codec,)

    @property
    def codec(self) -> CodecConfig:
        """The config of the codec alone, without the settings that `Compression` adds to it."""
        (kind,) = (base for base in type(self).__bases__ if issubclass(base, Codec))
        own = {name: getattr(self, name) for name in kind.model_fields}
        codec: PyTree = kind.model_construct(**own)
        return codec

    @property
    def feedback(self) -> Feedback:
        """The error feedback that the settings select."""
        if isinstance(self.error_feedback, bool):
            return CLASSIC if self.error_feedback else NoFeedback()
        return self.error_feedback

    def choice(
        self, shapes: Mapping[str, tuple[int, ...]], scanned: frozenset[str]
    ) -> PerParameter:
        """Return the choice of a codec for each parameter.

        Args:
          shapes: the shapes of the parameters, by name.
          scanned: the names of the parameters whose first dim counts layers. Each layer of such a
            parameter is treated as a vector or matrix by itself.
        """
        own: list[CodecRule] = []
        for name in sorted(scanned & shapes.keys()):
            # A stack of vectors has two dims, and `PerParameter` would treat it as a matrix.
            vector = len(shapes[name]) < 3 and self.vectors == "whole"
            if vector:
                own.append(CodecRule.model_construct(pattern=escape(name), codec=WholeCodec()))
            elif isinstance(self, LowRank):
                layered = self.codec.model_copy(update={"stacked_dims": 1})
                own.append(
                    CodecRule.model_construct(pattern=escape(name), codec=self._staged(layered))
                )
        return PerParameter.model_construct(
            rules=(*self.rules, *own), otherwise=self._staged(self.codec), vectors=self.vectors
        )

    def _staged(self, codec: CodecConfig) -> Codec | Stages:
        if self.warmup == "sparser" and isinstance(codec, TopK):
            return sparsity_warm_up(codec, self.warmup_steps)
        return warm_up(codec, self.warmup_steps)


class CompressWhole(Compression, WholeCodec): ...


class CompressCast(Compression, Cast): ...


class CompressQuantize(Compression, Quantize): ...


class CompressAdaptive(Compression, Adaptive): ...


class CompressSign(Compression, Sign): ...


class CompressTopK(Compression, TopK): ...


class CompressRandomK(Compression, RandomK): ...


class CompressLowRank(Compression, LowRank): ...


class CompressChain(Compression, Chain): ...


class CompressAuto(Compression, AutoCodec):
    """The settings of compressed gradients with an automatic choice of the codec."""

    @property
    def codecs(self) -> tuple[CodecConfig, ...]:
        return self.candidates

    def chosen(
        self,
        blocks: Grads,
        scanned: frozenset[str],
        sizes: Mapping[str, int],
        device_kind: str,
        algorithm: Algorithm,
    ) -> Compression:
        """Return these settings with the candidate that has the least predicted time.

        Args:
          blocks: the shapes of one device's gradients.
          scanned: the names of the parameters whose first dim counts layers.
          sizes: the sizes of the axes over which gradients are summed, by name. The axis across
            the slowest network comes first.
          device_kind: the kind of the devices, as a short name or a `jax.Device.device_kind`.
          algorithm: the algorithm of the collectives.

        Raises:
          CollectiveError: a link is neither configured nor known for the device.
          CompressionError: no candidate can encode all gradients.
        """
        shapes = {name: tuple(leaf.shape) for name, leaf in flatten_with_names(blocks)}
        across = self.axis == "data.dcn"
        codec = resolve(
            self, blocks, sizes, device_kind, inside=across, algorithm=algorithm,
            choice_of=lambda codec: self.with_codec(codec).choice(shapes, scanned),
        )  # fmt: skip
        return self.with_codec(codec)

    def with_codec(self, codec: CodecConfig) -> Compression:
        """Return these settings with the given codec instead of the automatic choice."""
        (kind,) = (k for k in KINDS if issubclass(k, type(codec)))
        values: PyTree = {name: getattr(self, name) for name in Compression.model_fields}
        values |= {name: getattr(codec, name) for name in type(codec).model_fields}
        return kind.model_construct(**values)


WithCodec: TypeAlias = (
    CompressWhole
    | CompressCast
    | CompressQuantize
    | CompressAdaptive
    | CompressSign
    | CompressTopK
    | CompressRandomK
    | CompressLowRank
    | CompressChain
)
KINDS: tuple[type[Compression], ...] = get_args(WithCodec)
CompressionConfig: TypeAlias = Annotated[WithCodec | CompressAuto, Field(discriminator="type")]
