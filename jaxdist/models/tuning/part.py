"""The part of a model's parameters that is trained."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, PositiveFloat, model_validator

from jaxdist.config.schema import Config, Count

Pattern = Annotated[str, Field(min_length=1)]
"""A pattern for names of parameters, in which `*` matches any characters, including `/`."""


class LoraConfig(Config):
    """Low-rank adapters, which are trained instead of the model's parameters."""

    rank: Count
    """The rank of an adapter, which is the number of columns of its first factor."""
    alpha: PositiveFloat
    """The strength of an adapter, whose product is multiplied by alpha / rank."""
    targets: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """The patterns for the names of the kernels that have adapters, such as `blocks/attention/*`.
    """
    rslora: bool = False
    """Whether to multiply an adapter's product by alpha / sqrt(rank) instead of alpha / rank
    (Kalajdzievski 2023, arXiv 2312.03732)."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The fraction of a kernel's input features that its adapter drops in a step. A layer draws the
    features once for all rows of a device's batch. 0 drops nothing."""

    @property
    def scale(self) -> float:
        """The factor by which an adapter's product is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class PartConfig(Config):
    """The settings, common to all models, that choose the parameters to train."""

    freeze: tuple[Pattern, ...] = ()
    """The patterns for the names of parameters that are not trained, such as `blocks/*`. Frozen
    parameters have neither gradients nor optimizer state."""
    lora: LoraConfig | None = None
    """The low-rank adapters that are trained instead of the model's own parameters; null trains the
    model's own parameters."""

    @model_validator(mode="after")
    def _check_part(self) -> PartConfig:
        if self.lora is not None and self.freeze:
            raise ValueError(
                "freeze has no effect with lora, which trains only adapters: leave out freeze or "
                "lora"
            )
        return self
