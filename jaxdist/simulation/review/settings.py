"""The settings of the review: the machines, the measured points and the recorded optimizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, model_validator

from jaxdist.config import validate
from jaxdist.config.load import read
from jaxdist.config.schema import Config, Count, FilePath
from jaxdist.simulation.choice import ChoiceConfig

FOLDER = Path(__file__).parent

Architecture = Literal["parameter server", "ring", "pipeline", "ZeRO 1", "ZeRO 3"]


def _ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    """Sort the numbers of devices, and refuse duplicates."""
    if len(set(values)) < len(values):
        raise ValueError(
            f"{list(values)} contains a number twice: name each number of devices once"
        )
    return tuple(sorted(values))


class MeasuredPoint(Config):
    """An efficiency that was measured between real processes."""

    architecture: Architecture
    """The architecture that was measured."""
    devices: Annotated[int, Field(ge=2)]
    """The number of devices."""
    efficiency: Annotated[float, Field(gt=0, le=2)]
    """The ratio of the seconds of a device's work alone to the seconds of the step."""
    source: str
    """The machine, network and command of the measurement."""


class Cell(Config):
    """The result of an optimizer at a batch size, over all seeds."""

    mean: float | None
    """The mean of the metric; null if a run diverged."""
    spread: NonNegativeFloat | None = None
    """The sample standard deviation over the seeds; null for a single run, or if a run diverged."""


class RecordedScaling(Config):
    """The results of a batch-scaling study, with learning rates tuned at each batch size."""

    source: str
    """The command and length of the study."""
    metric: Literal["accuracy", "loss"] = "accuracy"
    """The metric of the cells; an accuracy is a fraction."""
    batches: Annotated[tuple[Count, ...], Field(min_length=1)]
    """The batch sizes of the cells, ascending."""
    cells: Annotated[Mapping[str, tuple[Cell, ...]], Field(min_length=1)]
    """The results of each optimizer, one for each batch size."""

    @model_validator(mode="after")
    def _cells_match(self) -> RecordedScaling:
        for name, cells in self.cells.items():
            if len(cells) != len(self.batches):
                raise ValueError(
                    f"{name} has {len(cells)} cells for {len(self.batches)} batch sizes: give a "
                    "cell for each batch size"
                )
        return self


class ReviewConfig(Config):
    """The settings of the review.

    The settings name the compiled programs, the recorded study, and the machines of the curves.
    """

    devices: Annotated[tuple[Count, ...], Field(min_length=1), AfterValidator(_ascending)]
    """The numbers of devices of the curves."""
    parameter_bytes: PositiveFloat = 1.34e9
    """The bytes of the parameters, and of a gradient of all parameters. The default is BERT-large
    in float32."""
    step_seconds: PositiveFloat = 0.5
    """The seconds of a device's work in a step; each device has the same amount of work."""
    gbits: PositiveFloat = 100.0
    """The gigabits per second of each device's network, in each direction."""
    latency_seconds: NonNegativeFloat = 1e-5
    """The latency of a message in seconds."""
    servers: Annotated[int, Field(ge=1, le=64)] = 4
    """The number of parameter servers, for every number of workers."""
    microbatches: Annotated[int, Field(ge=1, le=4096)] = 64
    """The number of microbatches of a step of the pipeline."""
    layers: Count = 24
    """The number of layers; a pipeline has at most as many stages."""
    message_bytes: NonNegativeFloat = 4.2e6
    """The bytes that a stage sends to its successor for a microbatch."""
    measured: tuple[MeasuredPoint, ...] = ()
    """The measured efficiencies, which the page marks."""
    program: FilePath | None = None
    """The config whose train step is compiled for the tables of communication and memory, relative
    to the review's file; null compiles a small decoder."""
    patterns: Annotated[Mapping[str, tuple[str, ...]], Field(min_length=1)]
    """The settings of each compiled program, by its name in the tables."""
    scaling: RecordedScaling
    """The recorded study of optimizers at growing batch sizes."""

    def choice(self, workers: int) -> ChoiceConfig:
        """Return the settings of the simulated servers for the given number of workers."""
        return ChoiceConfig(
            parameter_bytes=self.parameter_bytes,
            touched=(1.0,),
            step_seconds=self.step_seconds,
            gbits=(self.gbits,),
            latency_seconds=self.latency_seconds,
            workers=workers,
            servers=self.servers,
        )

    @property
    def program_file(self) -> Path:
        """The path of the config whose train step is compiled."""
        return self.program or FOLDER / "program.yaml"


def read_review(settings: Sequence[str]) -> ReviewConfig:
    """Read the settings of a review; sections that a user's file lacks are from the shipped file.

    Args:
      settings: an optional path of a YAML file, followed by texts `key=value`.

    Raises:
      ConfigError: a setting does not exist, or has an invalid value.
    """
    shipped = FOLDER / "review.yaml"
    if not settings or "=" in settings[0]:
        return validate(read(shipped, settings), ReviewConfig)
    path = Path(settings[0])
    document = read(path, settings[1:])
    values = read(shipped).values | document.values
    config = validate(replace(document, values=values), ReviewConfig)
    program = config.program and path.parent / config.program
    return config.model_copy(update={"program": program})
