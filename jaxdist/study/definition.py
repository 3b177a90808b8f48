"""The schema of a study's YAML file, and the studies that jaxdist ships."""

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
"""The values of settings by dotted key, such as `section.key`."""
Case = Literal["adamw", "sgd", "other"]
"""The kinds of optimizers. For "adamw" and "sgd", compressed messages can contain the optimizer's
momentum. For "other", compressed messages contain only gradients."""


def _once(values: tuple[int, ...]) -> tuple[int, ...]:
    """Return the values in ascending order; a value that occurs twice is an error.

    Raises:
      ValueError: a value is given more than once.
    """
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"{value} occurs {values.count(value)} times: name each value once")
    return tuple(sorted(values))


class _Study(Config):
    """The settings that all studies have."""

    config: FilePath
    """The path of the config to train, relative to the study's file."""
    set: Settings = Field(default_factory=dict)
    """The settings of every run that override the config, by dotted key."""
    seeds: Count = 3
    """The number of runs, each with another seed, from which a number in the table is computed."""


class VariantsStudy(_Study):
    """A study that compares variants of one config by their held-out loss."""

    type: Literal["variants"] = "variants"
    of: str | None = None
    """The name of a shipped set of variants. The only shipped set is compression. With null, the
    study compares the variants of `variants`."""
    variants: dict[str, Settings] = Field(default_factory=dict)
    """The settings of each variant, by the variant's name."""


class Contender(Config):
    """An optimizer that a batch-scaling study compares."""

    section: Settings
    """The section `optim` of the config, without learning rate and schedule."""
    start: PositiveFloat
    """The initial learning rate of the search at the smallest batch size."""


class BatchScalingStudy(_Study):
    """A study of optimizers at growing batch sizes.

    The learning rates are from a rule and from a search.
    """

    type: Literal["batch_scaling"] = "batch_scaling"
    batches: Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(_once)]
    """The batch sizes. The rule scales the learning rate of the smallest size for the other
    sizes."""
    contenders: Annotated[dict[str, Contender], Field(min_length=1)]
    """The optimizers by name, by default the optimizers of `batch_scaling.yaml`."""
    epochs: float | None = None
    """The number of epochs of every run, or null for the number in the config."""
    tune: bool = True
    """Whether the learning rate is tuned at every batch size, and not only at the smallest size."""


class SetVariant(Config):
    """A variant of a shipped set."""

    name: str
    """The name of the variant's row in the table."""
    when: tuple[Case, ...] = ("adamw", "sgd", "other")
    """The kinds of optimizers to which the variant applies."""
    set: Settings
    """The settings by dotted key. Values of the config replace texts that begin with $."""


class SetFile(Config):
    """A shipped set of variants."""

    notes: dict[Case, str]
    """A sentence about the adaptation of the set to a config, for each kind of optimizer."""
    variants: tuple[SetVariant, ...]
    """The variants. The first variant is the baseline."""


_KINDS: Mapping[str, type[VariantsStudy | BatchScalingStudy]] = {
    "variants": VariantsStudy,
    "batch_scaling": BatchScalingStudy,
}


def read_study(path: Path, overrides: Sequence[str] = ()) -> VariantsStudy | BatchScalingStudy:
    """Return the study that a file defines.

    A batch-scaling study takes missing settings from the shipped file.

    Args:
      path: the path of the file.
      overrides: the settings that override the file.

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
    """Return the shipped set of variants with the given name."""
    return validate(read(FOLDER / f"{name}.yaml"), SetFile)
