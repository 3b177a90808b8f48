"""The choice of codecs by step and by parameter."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Annotated, Literal, TypeAlias

import jax
import jax.numpy as jnp
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
"""The fractions of the elements that Deep Gradient Compression sends, in order, in its warm-up."""


class Stage(Config):
    """A codec and the step from which it is used."""

    start: Annotated[int, Field(ge=0)]
    """The first step of the stage, counted from 0. Steps that are skipped because of a NaN or an
    infinity do not count."""
    codec: CodecConfig
    """The codec of the gradients in this stage."""


class Stages(Config):
    """A sequence of codecs, each for the steps from its start on, in one compiled program."""

    type: Literal["stages"] = "stages"
    """The name that selects a sequence of codecs in a config."""
    stages: tuple[Stage, ...]
    """The stages in the order of their starts. The first stage must start at step 0."""

    @field_validator("stages")
    @classmethod
    def _in_order(cls, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
        starts = [stage.start for stage in stages]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError(
                f"stages start at {starts}: the first stage must start at step 0, and each "
                "later stage after the start of the stage before it"
            )
        return stages


def warm_up(codec: CodecConfig, steps: int) -> Codec | Stages:
    """Return stages that send uncompressed gradients for `steps` steps, and then use `codec`.

    If `steps` is 0, the result is `codec`.

    >>> [stage.start for stage in warm_up(TopK(), 100).stages]
    [0, 100]
    """
    if not steps:
        return codec
    return Stages(stages=(Stage(start=0, codec=WholeCodec()), Stage(start=steps, codec=codec)))


def sparsity_warm_up(codec: TopK, steps: int) -> Codec | Stages:
    """Return stages that send fewer and fewer elements, and then use `codec`.

    The warm-up is from Deep Gradient Compression (section 3.3). The warm-up has equal parts, which
    send 25%, 6.25%, 1.5625% and 0.4% of the elements. A part is left out if it would not send more
    elements than `codec`. If no part is left, or if there are fewer steps than parts, the result is
    `codec`.

    Args:
      codec: the codec after the warm-up.
      steps: the number of steps of the warm-up.
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
    """The pattern of parameter names, such as `*/bias` or `layers/*/kernel`. If several rules match
    a name, the first of these rules is used."""
    codec: AnyStages
    """The codec, or stages of codecs, of the parameters that match."""


class PerParameter(Config):
    """A choice of a codec for each parameter, by its name and its number of dims."""

    type: Literal["per_parameter"] = "per_parameter"
    """The name that selects a choice for each parameter in a config."""
    rules: tuple[CodecRule, ...] = ()
    """The rules, in their order of precedence. Each rule must match a parameter."""
    otherwise: AnyStages
    """The codec of the parameters that no rule matches."""
    vectors: Literal["whole", "otherwise"] = "whole"
    """The codec of parameters with fewer than two dims (norms, biases) that no rule matches:
    `whole` sends them uncompressed, and `otherwise` uses the codec `otherwise` for them."""

    def choice(self, name: str, leaf: Leaf) -> Codec | Stages:
        """Return the codec, or the stages of codecs, of a single parameter."""
        for rule in self.rules:
            if fnmatchcase(name, rule.pattern):
                return rule.codec
        if self.vectors == "whole" and len(leaf.shape) < 2:
            return WholeCodec()
        return self.otherwise

    def check(self, names: Sequence[str]) -> None:
        """Raise CompressionError if a rule matches none of the parameter names."""
        for rule in self.rules:
            if not any(fnmatchcase(name, rule.pattern) for name in names):
                raise CompressionError(
                    f"rule {rule.pattern!r} fits no parameter: {did_you_mean(rule.pattern, names)}"
                )


Choice: TypeAlias = Codec | Stages | PerParameter
"""A codec, stages of codecs, or a choice for each parameter."""


@dataclass(frozen=True)
class CodecGroup:
    """A group of parameters that have the same choice of codecs.

    Attributes:
      starts: the first step of each stage. A choice without stages has one stage.
      codecs: the codec of each stage.
      buckets: for each bucket, the indices of the leaves that are packed into it.
    """

    starts: tuple[int, ...]
    codecs: tuple[Codec, ...]
    buckets: tuple[tuple[int, ...], ...]

    @property
    def lossless(self) -> bool:
        return all(codec.lossless for codec in self.codecs)

    @property
    def positions(self) -> list[int]:
        """The indices of the group's leaves among all leaves."""
        return [index for bucket in self.buckets for index in bucket]

    @property
    def in_shards(self) -> bool:
        """Whether each device sums a shard of each bucket, and then encodes the sum."""
        return any(codec.exchange == "scatter" for codec in self.codecs)

    @property
    def flat(self) -> bool:
        """Whether every codec encodes a bucket as one vector."""
        return all(codec.flat for codec in self.codecs)

    def likes(self, leaves: Sequence[Leaf]) -> list[jax.ShapeDtypeStruct]:
        """Return the shape of each bucket's packed leaves, given all leaves."""
        found = []
        for bucket in self.buckets:
            size = sum(math.prod(leaves[i].shape) for i in bucket)
            shape = (size,) if self.flat else tuple(leaves[bucket[0]].shape)
            found.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        return found


def plan_groups(
    named: Sequence[tuple[str, Leaf]], choice: Choice, feedback: Feedback, bucket_bytes: int
) -> list[CodecGroup]:
    """Group the leaves that have the same choice, and assign the leaves of each group to buckets.

    The last leaves are in the first buckets, because their gradients are ready first in a backward
    pass. Empty leaves are in no group.

    Args:
      named: the leaves with their names.
      choice: the choice of codecs.
      feedback: the error feedback.
      bucket_bytes: the maximum number of bytes of a bucket.

    Raises:
      CompressionError: a codec cannot encode a leaf, the codecs of two stages need different
        buckets, the feedback does not fit a codec, or a rule matches no parameter.
    """
    if isinstance(choice, PerParameter):
        choice.check([name for name, _ in named])
    chosen: list[tuple[Codec | Stages, list[int]]] = []
    for index, (name, leaf) in enumerate(named):
        if 0 in leaf.shape:  # Codecs refuse empty arrays, which have nothing to send.
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
    # If a codec depends on the shape of an array, each leaf has a bucket for itself. Otherwise
    # several leaves share a bucket.
    shaped = [codec for codec in codecs if not codec.flat]
    mine = [leaves[position] for position in positions]
    buckets = plan_buckets(mine, None if shaped else bucket_bytes)
    packed = tuple(tuple(positions[index] for index in bucket) for bucket in buckets)
    group = CodecGroup(tuple(starts), tuple(codecs), packed)
    if shaped and group.in_shards:
        other = next(codec for codec in codecs if codec.exchange == "scatter")
        raise CompressionError(
            f"{described(shaped[0], mine[0])}: the codec cannot follow or precede {other!r}, "
            "which encodes flat shards. Use codecs whose messages can be summed (whole, randomk, "
            "lowrank) in all stages, or use a single codec"
        )
    return group
