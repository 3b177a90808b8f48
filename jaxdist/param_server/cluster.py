"""The config of a cluster of workers and parameter servers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from jaxdist.compression import ErrorFeedback, Feedback, NoFeedback
from jaxdist.compression.codecs.build import CodecConfig
from jaxdist.config.schema import Config, Count
from jaxdist.errors import CompressionError, ConfigError, blamed
from jaxdist.optim.common import OptimizerConfig
from jaxdist.param_server.aggregation import AggregationConfig, Direct, Secure
from jaxdist.param_server.consistency.arrival import SSP, OnArrival
from jaxdist.param_server.consistency.build import ConsistencyConfig
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.consistency.decoupled import Decoupled
from jaxdist.param_server.consistency.elastic import Elastic
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.placement.balanced import Balanced
from jaxdist.param_server.placement.build import PlacementConfig
from jaxdist.param_server.placement.contract import Placement
from jaxdist.param_server.placement.ranges import placeable_tensors, updates_elementwise
from jaxdist.param_server.protocol.rack import WITHIN
from jaxdist.param_server.scenario import SimulationConfig, shares_by_speed
from jaxdist.types import Params
from jaxdist.validity.features import Facts
from jaxdist.validity.table import check
from jaxdist.wire.config import ProcessesConfig

Shares = tuple[Count, ...]


class Cluster(Config):
    """A cluster of workers that compute gradients and servers that hold parameters."""

    workers: Count
    """The number of workers; each worker computes gradients on its part of a batch."""
    servers: Count = 1
    """The number of servers that share the parameters."""
    consistency: ConsistencyConfig = SSP()
    """The consistency model, selected by its `type`, which determines when changes are applied and
    which versions workers may read."""
    placement: PlacementConfig = Balanced()
    """The assignment of parameters to servers, selected by its `type`."""
    aggregation: AggregationConfig = Direct()
    """The combination of pushes on their way to the servers, selected by its `type`."""
    codec: CodecConfig | None = None
    """The compression of pushes, selected by its `type`. Norms and biases are never compressed.
    null compresses nothing."""
    error_feedback: bool = True
    """Whether a client adds the error of a compressed push to its next push."""
    batch_shares: Literal["equal", "by_speed"] | Shares = "equal"
    """The division of a batch among workers: equal, by_speed (by simulation.step_seconds), or the
    number of examples of each worker."""
    processes: ProcessesConfig = ProcessesConfig()
    """The settings of the server and worker processes of `jaxdist train`."""
    simulation: SimulationConfig = SimulationConfig()
    """The speeds, network and failures that `jaxdist simulate` assumes."""

    @model_validator(mode="after")
    def _remote(self) -> Self:
        self.processes.check_remote(self.servers, self.workers)
        return self

    @property
    def racks(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each rack, or () if all workers push to the servers directly."""
        return self.aggregation.racks(range(self.workers))

    def rack_of(self, worker: int) -> int | None:
        """Return the number of a worker's rack, or None without racks.

        >>> from jaxdist.param_server.aggregation import Racks
        >>> Cluster(workers=4, aggregation=Racks(size=2)).rack_of(2)
        1
        """
        return next((at for at, rack in enumerate(self.racks) if worker in rack), None)

    @property
    def secure(self) -> dict[str, int]:
        """The arguments `clients` and `needed` of secure aggregation, or {} without it.

        `clients` is the number of clients, and `needed` is the number of clients that must complete
        a round.
        """
        if not isinstance(self.aggregation, Secure):
            return {}
        return {"clients": self.workers, "needed": self.aggregation.needed(self.workers)}

    @property
    def clients(self) -> int:
        """The number of clients that push to the servers: racks, or the workers themselves."""
        return len(self.racks) or self.workers

    @property
    def of_workers(self) -> Consistency:
        """The consistency model that workers follow: `consistency`, or lockstep within a rack."""
        return WITHIN if self.racks else self.consistency

    @property
    def local_steps(self) -> int:
        """The number of gradients that a worker computes from one push to the next."""
        match self.consistency:
            case Elastic():
                return self.consistency.every
            case Decoupled():
                return self.consistency.local_steps
            case _:
                return 1

    @property
    def pooled(self) -> bool:
        """Whether a faster worker takes more steps than a slower worker."""
        model = self.consistency
        return isinstance(model, OnArrival) or (
            isinstance(model, Elastic) and model.order == "arrival"
        )

    @property
    def updates_per_step(self) -> int:
        """The number of updates in a step of all workers.

        This is the number of clients if each change is applied on arrival, and otherwise 1.
        """
        return self.clients if isinstance(self.consistency, OnArrival) else 1

    def placed(self, params: Params, optim: OptimizerConfig) -> Placement:
        """Return the assignment of parameters to servers.

        Args:
          params: all parameters, or their shapes.

        Raises:
          ConfigError: there are more servers than ranges (parts of parameters), or than the
            placement supports.
        """
        with blamed("servers"):
            tensors = placeable_tensors(params, divisible=updates_elementwise(optim))
            return self.placement.place(tensors, range(self.servers))

    @property
    def feedback(self) -> Feedback:
        """The error feedback that clients apply to compressed pushes."""
        return ErrorFeedback() if self.error_feedback else NoFeedback()

    def clocks(self, steps: int) -> int:
        """Return the smallest number of pushes for at least `steps` steps of a worker.

        >>> Cluster(workers=2, consistency=Elastic(every=4)).clocks(10)
        3
        """
        return -(-steps // self.local_steps)

    def shares(self, batch_size: int) -> Shares:
        """Return the number of examples of each worker in a batch, ordered by worker.

        Raises:
          ConfigError: the given shares do not add up to the batch, or the batch cannot be divided
            among the workers.

        >>> Cluster(workers=4).shares(8)
        (2, 2, 2, 2)
        """
        if self.batch_shares == "by_speed":
            return shares_by_speed(self.simulation.speeds(self.workers), batch_size)
        if self.batch_shares != "equal":
            return self._given_shares(self.batch_shares, batch_size)
        if batch_size % self.workers:
            raise ConfigError(
                f"train.batch_size {batch_size} does not divide by {self.workers} workers: set "
                f"train.batch_size: {batch_size // self.workers * self.workers or self.workers}, "
                "another number of workers, or strategy.batch_shares: by_speed",
                setting=("workers",),
            )
        return (batch_size // self.workers,) * self.workers

    def _given_shares(self, given: Shares, batch_size: int) -> Shares:
        if len(given) != self.workers or sum(given) != batch_size:
            raise ConfigError(
                f"batch_shares has {len(given)} numbers that add up to {sum(given)}: give a number "
                f"of examples for each of the {self.workers} workers; the sum must be {batch_size} "
                "(train.batch_size)",
                setting=("batch_shares",),
            )
        return given

    def step_seconds(self, batch_size: int) -> tuple[float, ...]:
        """Return the seconds that each worker needs for its share of a batch, without stragglers.

        Raises:
          ConfigError: the number of speeds or shares differs from the number of workers.
        """
        speeds = self.simulation.speeds(self.workers)
        mean = batch_size / self.workers
        shares = self.shares(batch_size)
        return tuple(time * share / mean for time, share in zip(speeds, shares, strict=True))

    def check_cluster(self, *, learning_rate: float) -> None:
        """Refuse settings of the cluster that cannot be combined.

        Raises:
          ConfigError: settings cannot be combined. The path in the error starts at this section,
            but the path of a rule in the table of validity starts at the root of the config.
        """
        check(Facts({}, (), strategy="parameter_server", settings=self.settings))
        with blamed("simulation"):
            self.simulation.check(self.workers, self.servers)
        with blamed("consistency"):
            self.consistency.check(workers=self.clients, learning_rate=learning_rate)
        with blamed("aggregation"):
            self.aggregation.check(self.workers)
        if self.codec is not None:
            try:
                self.feedback.check(self.codec)
            except CompressionError as error:
                raise ConfigError(str(error), setting=("codec",)) from None

    @property
    def settings(self) -> dict[str, str]:
        """The settings that the table of validity reads, by dotted path."""
        model = self.consistency
        found = {
            "strategy.consistency.type": model.type,
            "strategy.aggregation.type": self.aggregation.type,
        }
        if self.codec is not None:
            found["strategy.codec"] = self.codec.type
        if isinstance(model, OnArrival) and model.value_bound is not None:
            found["strategy.consistency.value_bound"] = f"{model.value_bound:g}"
        if isinstance(model, OnArrival) and model.delay_compensation is not None:
            found["strategy.consistency.delay_compensation"] = "set"
        if isinstance(model, BSP) and model.backups:
            found["strategy.consistency.backups"] = str(model.backups)
        return found
