"""The choice between parameter servers and an all-reduce, by simulated and predicted step times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat
from rich.console import Console

from jaxdist.collectives.cost import Level, predict_seconds
from jaxdist.collectives.operations import XLA
from jaxdist.columns import aligned
from jaxdist.config.schema import Config
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.arrival import SSP, Asynchronous
from jaxdist.param_server.consistency.build import ConsistencyConfig
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.scenario import NetworkConfig, SimulationConfig
from jaxdist.runtime import hardware
from jaxdist.simulation.engine.pace import step_seconds
from jaxdist.study.files import check_writable, read_settings, write_study

RING = "all-reduce"
MODELS: Mapping[str, ConsistencyConfig] = {
    "bsp": BSP(),
    "ssp 2": SSP(bound=2),
    "async": Asynchronous(),
}
"""The consistency models that are compared, the strictest first."""
PLAYED_BYTES = 2**19
"""The largest number of bytes of a simulated model. If a model is larger, the model and its links
are scaled down by the same factor, so that times are unchanged."""
PLAYED_STEPS = 24
"""The number of steps that fit into the time of a simulation, if each step takes its estimated
time; the estimate is an upper bound."""
CLEAR = 0.95
"""An exchange is rejected if the fastest exchange takes less than this fraction of the rejected
exchange's time."""

Share = Annotated[float, Field(gt=0, le=1)]


class ChoiceConfig(Config):
    """The model to train, and the machines that train it."""

    parameter_bytes: Annotated[float, Field(ge=4096)] = 1e8
    """The bytes of the parameters, and of a gradient of all parameters."""
    touched: tuple[Share, ...] = (1.0, 0.01)
    """The share of the parameters that a worker's batch reads and changes; 1 is a dense model."""
    step_seconds: PositiveFloat = 0.1
    """The seconds for the gradient of a worker's part of a batch."""
    gbits: tuple[PositiveFloat, ...] = (1.0, 10.0, 100.0)
    """The gigabits per second of each host's network card, in each direction."""
    latency_seconds: NonNegativeFloat = 1e-4
    """The latency of a message in seconds, in addition to the time for its bytes."""
    workers: Annotated[int, Field(ge=2, le=64)] = 8
    """The number of workers: hosts that compute gradients."""
    servers: Annotated[int, Field(ge=1, le=64)] = 4
    """The number of servers, which are additional hosts that hold the parameters."""
    slower: Annotated[float, Field(gt=1)] = 2.0
    """The factor by which the step time of one worker is multiplied, in the rows of the table that
    have a straggler."""
    noise: PositiveFloat = 0.3
    """The standard deviation of the logarithm of each step's time, in the rows of the table in
    which every worker is slow at times."""

    def speeds(self) -> tuple[Speeds, ...]:
        """Return the compared distributions of the workers' step times."""
        return (
            Speeds("equal"),
            Speeds(f"one {self.slower:g}x slow", slowest=self.slower),
            Speeds("all at times", noise=self.noise),
        )


@dataclass(frozen=True)
class Speeds:
    """A distribution of the step times of the workers.

    Attributes:
      slowest: the factor by which the step time of one of the workers is multiplied.
      noise: the standard deviation of the logarithm of each step's time.
    """

    name: str
    slowest: float = 1.0
    noise: float = 0.0


@dataclass(frozen=True)
class Choice:
    """A row of the table: the step times for a sparsity, a link and a kind of straggler.

    Attributes:
      touched: the share of the parameters that a worker's batch reads and changes.
      gbits: the gigabits per second of each host's network card.
      speeds: the name of the distribution of the workers' step times.
      seconds: the time of a step of all workers in seconds, for each exchange of gradients.
    """

    touched: float
    gbits: float
    speeds: str
    seconds: Mapping[str, float]

    @property
    def take(self) -> str:
        """The first exchange in `seconds` that is nearly as fast as the fastest (see `CLEAR`).

        The first key of `seconds` is the all-reduce. The consistency models follow, the strictest
        first.
        """
        fastest = min(self.seconds.values())
        return next(name for name, took in self.seconds.items() if CLEAR * took <= fastest)


def run_choice(
    settings: Sequence[str], *, json_file: Path | None = None, console: Console
) -> list[Choice]:
    """Print and write recommendations, and return them.

    The same settings give the same numbers.

    Args:
      settings: an optional path of a YAML file of `ChoiceConfig`, followed by texts `key=value`.
      json_file: the file for the results, or None to write none.

    Raises:
      JaxdistError: a setting is unknown, or the file cannot be written.
    """
    config = read_settings(settings, ChoiceConfig)
    check_writable(None, json_file)
    found = list(choice_rows(config))
    console.print(text(config, found), soft_wrap=True, markup=False)
    rows = [{**asdict(row), "take": row.take} for row in found]
    write_study(json_file, {"config": config.model_dump(), "rows": rows})
    return found


def choice_rows(config: ChoiceConfig) -> Iterator[Choice]:
    """Yield a row for each combination of a sparsity, a link and a kind of straggler."""
    for touched, gbits, speeds in product(config.touched, config.gbits, config.speeds()):
        found = {RING: ring_seconds(config, touched, gbits, speeds)}
        for name, model in MODELS.items():
            found[name] = server_seconds(config, touched, gbits, speeds, model)
        yield Choice(touched, gbits, speeds.name, found)


def ring_seconds(config: ChoiceConfig, touched: float, gbits: float, speeds: Speeds) -> float:
    """Return the time of a step that ends in an all-reduce of whole gradients.

    If workers touch only a part of the parameters, and an all-gather of this part's gradients is
    faster, the all-gather is used instead. No communication overlaps with the backward pass.

    Args:
      config: the settings of the comparison.
      touched: the share of the parameters that a worker's batch changes.
      gbits: the gigabits per second of each host's network card.
      speeds: the distribution of the workers' step times.
    """
    link = hardware.Link(config.latency_seconds, gbits * 1e9 / 8)
    levels = [Level(config.workers, link)]
    exchanges = [predict_seconds(XLA, "all_reduce", config.parameter_bytes, levels)]
    if touched < 1:
        gathered = config.workers * touched * config.parameter_bytes
        exchanges.append(predict_seconds(XLA, "all_gather", gathered, levels))
    # Each step waits for its slowest worker, so the maximum over workers comes before the mean over
    # steps.
    draws = np.random.default_rng(0).lognormal(0.0, speeds.noise, (4096, config.workers))
    draws[:, 0] *= speeds.slowest
    return float(draws.max(axis=1).mean()) * config.step_seconds + min(exchanges)


def server_seconds(
    config: ChoiceConfig, touched: float, gbits: float, speeds: Speeds, model: ConsistencyConfig
) -> float:
    """Return the simulated time of a step of all workers.

    Workers pull and push only the parameters that they touch.

    Args:
      config: the settings of the comparison.
      touched: the share of the parameters that a worker's batch changes.
      gbits: the gigabits per second of each host's network card.
      speeds: the distribution of the workers' step times.
      model: the consistency model.
    """
    size = touched * config.parameter_bytes
    scale = min(1.0, PLAYED_BYTES / size)
    rate = gbits * 1e9 / 8
    card = NetworkConfig(
        bytes_per_second=scale * rate,
        server_bytes_per_second=scale * rate,
        latency_seconds=config.latency_seconds,
    )
    own = (config.step_seconds * speeds.slowest, *[config.step_seconds] * (config.workers - 1))
    script = SimulationConfig(step_seconds=own, noise=speeds.noise, link=card)
    cluster = Cluster(
        workers=config.workers, servers=config.servers, consistency=model, simulation=script
    )
    # The estimate of a step's time is an upper bound, so the simulation contains at least two
    # steps.
    exchange = 2 * size * (config.workers / config.servers + 1) / rate
    most = max(own) * (1 + 2 * speeds.noise) + exchange
    return step_seconds(cluster, int(scale * size / 4), PLAYED_STEPS * most)


def text(config: ChoiceConfig, rows: Sequence[Choice]) -> str:
    """Format the compared exchanges as a table of at most 80 columns."""
    names = list(rows[0].seconds)
    cells = [
        [
            *(f"{row.touched:.4g}", f"{row.gbits:g}", row.speeds),
            *(f"{1e3 * row.seconds[name]:,.0f}" for name in names),
            row.take,
        ]
        for row in rows
    ]
    lines = [
        f"{config.workers} workers, {config.servers} servers, {config.parameter_bytes:,.0f} bytes "
        f"of parameters, {config.step_seconds:g} s for a gradient",
        "milliseconds of a step of all workers, without overlap with the backward pass",
        "",
        *aligned(["touched", "Gbit/s", "workers", *names, "take"], cells, left=[2, -1]),
    ]
    return "\n".join(lines)
