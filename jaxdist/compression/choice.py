"""The choice of codecs by step and by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, field_validator

from jaxdist.collectives.bucket import plan_buckets
from jaxdist.compression.codecs.build import CodecConfig
from jaxdist.compression.codecs.topk import TopK
from jaxdist.compression.codecs.whole import WholeCodec
from jaxdist.compression.contract import Codec, described
from jaxdist.compression.feedback.contract import Feedback
from jaxdist.config.schema import Config
from jaxdist.errors import CompressionError, did_you_mean
from jaxdist.types import Leaf

DENSITIES = (0.25, 0.0625, 0.015625, 0.004)
"""Fractions of the elements that Deep Gradient Compression sends in the parts of its warm-up."""


class Stage(Config):
    """A codec and the step from which it is used."""

    start: Annotated[int, Field(ge=0)]
    """First step of the stage, from 0; steps skipped for a NaN or an infinity do not count."""
    codec: CodecConfig
    """Codec of the gradients in this stage."""


class Stages(Config):
    """A sequence of codecs over the course of training, in one compiled program."""

    type: Literal["stages"] = "stages"
    """Selects a sequence of codecs."""
    stages: tuple[Stage, ...]
    """The stages in the order of their starts; the first starts at step 0."""

    @field_validator("stages")
    @classmethod
    def _in_order(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        starts = [stage.start for stage in stages]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError(f"stages start at {starts}: the first at 0, each later than the last")
        return stages


def warm_up(codec: CodecConfig, steps: int) -> Codec | Stages:
    """Return stages that send whole gradients for `steps` steps, and use `codec` afterwards.

    >>> [stage.start for stage in warm_up(TopK(), 100).stages]
    [0, 100]
    """
    if not steps:
        return codec
    return Stages(stages=(Stage(start=0, codec=WholeCodec()), Stage(start=steps, codec=codec)))


def sparsity_warm_up(codec: TopK, steps: int) -> Codec | Stages:
    """Return stages that send ever fewer elements, as in Deep Gradient Compression (section 3.3).

    Args:
      codec: the codec after the warm-up.
      steps: number of steps of the warm-up, whose equal parts send 25%, 6.25%, 1.5625% and 0.4% of
        the elements.
    """
    denser = [density for density in DENSITIES if density > codec.fraction]
    if steps < len(denser) or not denser:
        return codec
    starts = [steps * i // len(denser) for i in range(len(denser))]
    parts = [
        Stage(start=start, codec=codec.model_copy(update={"fraction": density}))
        for start, density in zip(starts, denser, strict=True)
    ]
    return Stages(stages=(*parts, Stage(start=steps, codec=codec)))


AnyStages = Annotated[Stages | CodecConfig, Field(discriminator="type")]


class CodecRule(Config):
    """A codec for the parameters whose name matches a pattern."""

    pattern: str
    """Pattern of parameter names, such as `*/bias` or `layers/*/kernel`; the first rule that
    matches a name counts."""
    codec: AnyStages
    """Codec of the parameters that match, or stages of codecs."""


class PerParameter(Config):
    """A codec for each parameter by its name; vectors (norms, biases) are not compressed."""

    type: Literal["per_parameter"] = "per_parameter"
    """Selects a codec for each parameter."""
    rules: tuple[CodecRule, ...] = ()
    """Rules in their order of precedence; each must match a parameter."""
    otherwise: AnyStages
    """Codec of the parameters that no rule matches."""
    vectors: Literal["whole", "otherwise"] = "whole"
    """Codec of parameters with fewer than two dims that no rule matches: whole sends them
    uncompressed, otherwise treats them like matrices."""

    def choice(self, name: str, leaf: Leaf) -> Codec | Stages:
        """Return the choice for a single parameter."""
        for rule in self.rules:
            if fnmatchcase(name, rule.pattern):
                return rule.codec
        if self.vectors == "whole" and len(leaf.shape) < 2:
            return WholeCodec()
        return self.otherwise

    def check(self, names: Sequence[str]) -> None:
        """Raise CompressionError for a rule that matches no parameter."""
        for rule in self.rules:
            if not any(fnmatchcase(name, rule.pattern) for name in names):
                raise CompressionError(
                    f"rule {rule.pattern!r} fits no parameter: {did_you_mean(rule.pattern, names)}"
                )


Choice: TypeAlias = Codec | Stages | PerParameter
"""A codec, stages of codecs, or a choice for each parameter."""


@dataclass(frozen=True)
class CodecGroup:
    """Parameters that share a choice.

    Attributes:
      starts, codecs: first step and codec of each stage; a choice without stages has one stage.
      buckets: for each bucket, the positions of the leaves that are packed into it.
    """

    starts: tuple[int, ...]
    codecs: tuple[Codec, ...]
    buckets: tuple[tuple[int, ...], ...]

    @property
    def lossless(self) -> bool:
        return all(codec.lossless for codec in self.codecs)

    @property
    def positions(self) -> list[int]:
        """The position of each leaf of the group among all leaves."""
        return [index for bucket in self.buckets for index in bucket]

    @property
    def in_shards(self) -> bool:
        """Whether each device sums a shard of each bucket and encodes the sum again."""
        return any(codec.exchange == "scatter" for codec in self.codecs)


def plan_groups(
    named: Sequence[tuple[str, Leaf]], choice: Choice, feedback: Feedback, bucket_bytes: int
) -> list[CodecGroup]:
    """Group the leaves that share a choice, and pack each group into buckets of one dtype.

    The last leaves come first, since their gradients are ready first in a backward pass.

    Raises:
      CompressionError: a codec that cannot encode a leaf; incompatible stages or feedback; a rule
        that matches nothing.
    """
    if isinstance(choice, PerParameter):
        choice.check([name for name, _ in named])
    chosen: list[tuple[Codec | Stages, list[int]]] = []
    for index, (name, leaf) in enumerate(named):
        if 0 in leaf.shape:  # Codecs refuse empty arrays, and there is nothing to send.
            continue
        mine = choice.choice(name, leaf) if isinstance(choice, PerParameter) else choice
        for stage in _stages(mine):
            stage.codec.check(leaf, name)
        same = next((found for other, found in chosen if other == mine), None)
        if same is None:
            chosen.append((mine, [index]))
        else:
            same.append(index)
    leaves = [leaf for _, leaf in named]
    return [_group(_stages(mine), found, leaves, feedback, bucket_bytes) for mine, found in chosen]


def _stages(choice: Codec | Stages) -> Sequence[Stage]:
    if isinstance(choice, Stages):
        return choice.stages
    return [Stage.model_construct(start=0, codec=choice)]


def _group(
    stages: Iterable[Stage],
    positions: Sequence[int],
    leaves: Sequence[Leaf],
    feedback: Feedback,
    bucket_bytes: int,
) -> CodecGroup:
    starts, codecs = zip(*((stage.start, stage.codec) for stage in stages), strict=True)
    for codec in codecs:
        feedback.check(codec)
    # A codec that depends on the shape has a bucket for each leaf; others are packed end to end.
    shaped = [codec for codec in codecs if not codec.flat]
    mine = [leaves[position] for position in positions]
    buckets = plan_buckets(mine, None if shaped else bucket_bytes)
    packed = tuple(tuple(positions[index] for index in bucket) for bucket in buckets)
    group = CodecGroup(tuple(starts), tuple(codecs), packed)
    if shaped and group.in_shards:
        other = next(codec for codec in codecs if codec.exchange == "scatter")
        raise CompressionError(
            f"{described(shaped[0], mine[0])} in stages with {other!r}, which encodes flat shards: "
            "use codecs in all stages whose messages can be summed (whole, randomk, lowrank), or "
            "use a single codec"
        )
    return group
