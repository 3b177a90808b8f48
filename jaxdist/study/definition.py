"""Studies as data: the schema of a study's YAML file, and the studies that jaxdist ships."""

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
"""Values of settings by dotted key, such as `section.key`."""
Case = Literal["adamw", "sgd", "other"]
"""Kinds of optimizers, by what compressed messages can carry: a momentum of AdamW, a momentum of
SGD, or gradients alone."""


def _once(values: tuple[int, ...]) -> tuple[int, ...]:
    """Sort values, and refuse duplicates."""
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value} is given {values.count(value)} times: give it once")
    return tuple(sorted(values))


class _Study(Config):
    """The settings that all studies have."""

    config: FilePath
    """Config to train, relative to the study's file."""
    set: Settings = Field(default_factory=dict)
    """Settings of every run that override the config, by dotted key."""
    seeds: Count = 3
    """Number of runs, each with another seed, from which each number in the table is computed."""


class VariantsStudy(_Study):
    """Variants of one config, compared by their held-out loss."""

    type: Literal["variants"] = "variants"
    of: str | None = None
    """Name of a shipped set of variants, of which there is one: compression."""
    variants: dict[str, Settings] = Field(default_factory=dict)
    """Settings of each variant, by name."""


class Contender(Config):
    """An optimizer under study."""

    section: Settings
    """The `optim` section of the config, without learning rate and schedule."""
    start: PositiveFloat
    """Initial learning rate of the search at the base batch size."""


class BatchScalingStudy(_Study):
    """Optimizers at growing batch sizes, with learning rates from a rule and from a search."""

    type: Literal["batch_scaling"] = "batch_scaling"
    batches: Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(_once)]
    """Batch sizes; the rule scales the learning rate from the smallest size to the others."""
    contenders: Annotated[dict[str, Contender], Field(min_length=1)]
    """Optimizers by name; by default the optimizers of `batch_scaling.yaml`."""
    epochs: float | None = None
    """Number of epochs of every run; null takes the number of the config."""
    tune: bool = True
    """Whether the learning rate is tuned at every batch size, not only at the smallest."""


class SetVariant(Config):
    """A variant of a shipped set."""

    name: str
    """Name of the variant's row in the table."""
    when: tuple[Case, ...] = ("adamw", "sgd", "other")
    """Kinds of optimizers to which the variant applies."""
    set: Settings
    """Settings by dotted key; texts that begin with $ are replaced by values of the config."""


class SetFile(Config):
    """A shipped set of variants."""

    notes: dict[Case, str]
    """Sentence about the adaptation of the set to a config, by kind of optimizer."""
    variants: tuple[SetVariant, ...]
    """Variants; the first is the baseline."""


_KINDS: Mapping[str, type[VariantsStudy | BatchScalingStudy]] = {
    "variants": VariantsStudy,
    "batch_scaling": BatchScalingStudy,
}


def read_study(path: Path, overrides: Sequence[str] = ()) -> VariantsStudy | BatchScalingStudy:
    """Read the file of a study; a batch-scaling study inherits settings from the shipped file.

    Raises:
      ConfigError: the file does not exist, or has invalid settings.
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
    """Return a shipped set of variants."""
    return validate(read(FOLDER / f"{name}.yaml"), SetFile)
