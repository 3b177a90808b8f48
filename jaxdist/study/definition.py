"""Studies as data: what the YAML file of a study holds, and the studies installed with jaxdist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat

from jaxdist.config import Document, validate
from jaxdist.config.load import read
from jaxdist.config.schema import Config, Count, FilePath
from jaxdist.errors import ConfigError, did_you_mean

FOLDER = Path(__file__).with_name("studies")
Settings = dict[str, Any]
"""Values by dotted key, as `section.key`."""
Case = Literal["adamw", "sgd", "other"]
"""Optimizers by what messages can be of: AdamW's momentum, SGD's, or that of none."""


def _once(values: tuple[int, ...]) -> tuple[int, ...]:
    """Sort values of which none is there twice."""
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value} is given {values.count(value)} times: give it once")
    return tuple(sorted(values))


class _Study(Config):
    """The part that all studies have."""

    config: FilePath
    """The config that is trained; relative to the study's file."""
    set: Settings = Field(default_factory=dict)
    """Settings of every run, by dotted key."""
    seeds: Count = 3
    """Runs for each number in the table."""


class VariantsStudy(_Study):
    """Variants of one config, trained alike, and their held-out loss."""

    type: Literal["variants"] = "variants"
    of: str | None = None
    """A set of variants that come along: compression."""
    variants: dict[str, Settings] = Field(default_factory=dict)
    """Settings of each variant, by its name."""


class Contender(Config):
    """An optimizer under study."""

    section: Settings
    """The `optim` section, without learning rate and schedule."""
    start: PositiveFloat
    """The learning rate that the search at the base batch begins with."""


class BatchScalingStudy(_Study):
    """Optimizers at growing batch sizes, by one rule and tuned."""

    type: Literal["batch_scaling"] = "batch_scaling"
    batches: Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(_once)]
    """Batch sizes; the smallest is where the rule begins."""
    contenders: Annotated[dict[str, Contender], Field(min_length=1)]
    """The optimizers, by name; those of `batch_scaling.yaml` by default."""
    epochs: float | None = None
    """Length of every run; the config's by default."""
    tune: bool = True
    """Whether learning rates are searched for at every batch size, not at the smallest alone."""


class SetVariant(Config):
    """A variant of a set that comes along."""

    name: str
    """The name of its row."""
    when: tuple[Case, ...] = ("adamw", "sgd", "other")
    """The optimizers that it is for."""
    set: Settings
    """Its settings by dotted key; texts that begin with $ stand for values of the config."""


class SetFile(Config):
    """A set of variants that comes along."""

    notes: dict[Case, str]
    """How the set fits a config, by its optimizer."""
    variants: tuple[SetVariant, ...]
    """The first is the one that the others are compared with."""


_KINDS: Mapping[str, type[VariantsStudy | BatchScalingStudy]] = {
    "variants": VariantsStudy,
    "batch_scaling": BatchScalingStudy,
}


def read_study(path: Path, overrides: Sequence[str] = ()) -> VariantsStudy | BatchScalingStudy:
    """Read the file of a study; what a batch-scaling study leaves out is that of the shipped one.

    Raises:
      ConfigError: no such file, or values that no study has.
    """
    document = read(path, overrides)
    kind = document.values.get("type", "variants")
    if kind not in _KINDS:
        raise ConfigError(f"{path}: type = {kind!r}: {did_you_mean(str(kind), _KINDS)}")
    values = {**(read(FOLDER / f"{kind}.yaml").values if kind == "batch_scaling" else {})}
    whole = Document(values | document.values, document.origins, document.path, document.files)
    study = validate(whole, _KINDS[kind])
    return study.model_copy(update={"config": path.parent / study.config})


@cache
def contenders() -> Mapping[str, Contender]:
    """Return the optimizers of the shipped batch-scaling study, by name."""
    values = read(FOLDER / "batch_scaling.yaml").values
    filled = Document({**values, "config": "", "batches": [1]})
    return validate(filled, BatchScalingStudy).contenders


@cache
def variant_set(name: str) -> SetFile:
    """Return a set of variants that comes along."""
    return validate(read(FOLDER / f"{name}.yaml"), SetFile)
