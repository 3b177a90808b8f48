"""A small schema with every kind of field that a configuration may have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from jaxdist.config import Config


class AdamW(Config):
    type: Literal["adamw"]
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the two moments."""


class Sgd(Config):
    type: Literal["sgd"]
    learning_rate: float = 0.1
    """Peak learning rate."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Decay of the velocity."""


class Split(Config):
    dcn: int = Field(ge=1)
    """Size over the slow network."""
    ici: int = Field(ge=1)
    """Size over the fast network."""


class Data(Config):
    files: list[Path]
    """Files to read."""
    window: int = Field(ge=1)
    """The number of tokens in a window."""
    shuffle: bool = True
    """Whether the order is random."""

    @field_validator("window")
    @classmethod
    def _even(cls, window: int) -> int:
        if window % 2:
            raise ValueError(f"a window of {window} is odd; use {window + 1}")
        return window

    @model_validator(mode="after")
    def _has_files(self) -> Data:
        if not self.files:
            raise ValueError("files is empty; name at least one")
        return self


class Run(Config):
    """The whole tree."""

    mesh: dict[str, Annotated[int, Field(ge=1)] | Split] = Field(default_factory=dict)
    """Axis sizes, outermost first."""
    optim: Annotated[AdamW | Sgd, Field(discriminator="type")]
    """The optimizer."""
    data: Data
    """Training data."""
    evaluate: Data | None = None
    """Held-out data."""
    schedule: Literal["cosine", "linear", "poly"] = "cosine"
    """Shape of the learning rate."""
    devices: PositiveInt | Literal["auto"] = "auto"
    """Devices to use."""
    stages: list[Split] = Field(default_factory=list)
    """The splits, one for each stage."""
    name: str = "run"
    """Name of the run."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of any type, which are passed on unchanged."""


BASE = """\
optim: {type: adamw, learning_rate: 1e-3}
data:
  files: [a.txt, b.txt]
  window: 4
mesh: {data: 4, tensor: {dcn: 2, ici: 4}}
"""
