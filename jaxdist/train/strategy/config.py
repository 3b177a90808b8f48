"""The configs of the strategies; an experiment selects a strategy by `type`.

`jaxdist.experiment.strategies` checks a strategy against the rest of the config, and
`jaxdist.run.strategies` runs it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, field_validator, model_validator

from jaxdist.config.schema import LARGEST, Config, Count
from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.arrival import SSP, Asynchronous
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.tables.optimizer import RowAdagrad, RowOptimizerConfig
from jaxdist.train.strategy.lookahead import Lookahead
from jaxdist.wire.config import ProcessesConfig

RowConsistency = Annotated[BSP | SSP | Asynchronous, Field(discriminator="type")]
"""The union of the consistency models for the rows of tables on servers."""


class Synchronous(Config):
    """A strategy in which processes take all steps together, and only steps change parameters."""

    type: Literal["synchronous"] = "synchronous"
    """The name that selects this strategy in a config."""

    def outer(self) -> None:
        return None


class ParameterServer(Cluster):
    """A strategy in which workers push gradients to servers, which hold and update the parameters.

    Dean et al., "Large scale distributed deep networks" (NIPS 2012); Li et al., "Scaling
    distributed machine learning with the parameter server" (OSDI 2014).
    """

    type: Literal["parameter_server"] = "parameter_server"
    """The name that selects this strategy in a config."""

    def outer(self) -> None:
        return None


class Hybrid(Config):
    """A strategy with a model's tables on servers; all other parameters are trained synchronously.

    In each step, every process pulls the rows that its examples need, each row once, and pushes the
    rows' gradients. Li et al., "Scaling distributed machine learning with the parameter server"
    (OSDI 2014); Lian et al., "Persia" (arXiv 2111.05897).
    """

    type: Literal["hybrid"] = "hybrid"
    """The name that selects this strategy in a config."""
    servers: Count = 1
    """The number of servers that share the rows of all tables when the run starts."""
    ranges: Count | None = None
    """The number of parts into which hashes divide the rows. With null, there are as many ranges as
    servers. A server that joins during the run takes whole ranges, so that a run with more ranges
    than servers can grow (`jaxdist servers`)."""
    replicas: Annotated[int, Field(ge=1, le=2)] = 1
    """The number of servers that have each row. With 2, a follower takes over when a server dies.
    """
    takeover_seconds: PositiveFloat = 10.0
    """The time without an answer, in seconds, after which a server is killed and followers take
    over, if replicas is 2. The death of a process is detected immediately."""
    optimizer: RowOptimizerConfig = RowAdagrad()
    """The optimizer of rows, selected by its `type`; optim is the optimizer of all other
    parameters."""
    consistency: RowConsistency = BSP()
    """The consistency model of rows, selected by its `type`. With bsp, a pull includes all earlier
    pushes of all processes."""
    most_rows: Annotated[int, Field(ge=32, le=LARGEST)] | None = None
    """The largest number of rows that all servers together keep; null keeps all rows. A bound is
    needed for ids of 64 bits. The first update of a row creates the row. If the set of 32 rows to
    which the row belongs is full, the row replaces the row of this set whose last update is oldest.
    """
    processes: ProcessesConfig = ProcessesConfig()
    """The settings of the server processes, which process 0 starts on its machine."""

    @property
    def range_count(self) -> int:
        """The number of ranges of rows."""
        return self.ranges or self.servers

    @field_validator("consistency")
    @classmethod
    def _reads(cls, model: RowConsistency) -> RowConsistency:
        if getattr(model, "reads", "each_clock") not in ("each_clock", "ahead"):
            raise ValueError(
                "rows of tables must be pulled for each batch, because each batch uses different "
                "rows: set reads: each_clock, or reads: ahead, which pulls them while the previous "
                "batch is computed"
            )
        unfit = {"backups": 0, "delay_compensation": None, "value_bound": None}
        for name, off in unfit.items():
            if getattr(model, name, off) != off:
                raise ValueError(
                    f"{name} works only for complete parameters, not for rows of tables: leave "
                    f"{name} out"
                )
        return model

    @model_validator(mode="after")
    def _replicated(self) -> Hybrid:
        self.processes.check_remote(self.servers)
        if self.replicas > self.servers:
            raise ValueError(
                f"replicas {self.replicas} exceeds servers {self.servers}: the copies of a row "
                f"must be on different servers; set servers: {self.replicas} or more, or "
                "replicas: 1"
            )
        if self.range_count < self.servers:
            raise ValueError(
                f"ranges {self.ranges} is less than servers {self.servers}: each server needs at "
                f"least one range; set ranges: {self.servers} or more"
            )
        if self.most_rows is not None and self.most_rows // 32 < self.range_count:
            kind = "servers: each server" if self.ranges is None else "ranges: each range"
            raise ValueError(
                f"most_rows {self.most_rows} is too small for {self.range_count} {kind} needs at "
                f"least one set of 32 rows; set most_rows: {32 * self.range_count} or more"
            )
        if self.range_count > self.servers and self.processes.port:
            raise ValueError(
                f"strategy.processes.port {self.processes.port} does not work with ranges "
                f"{self.ranges}: each range needs a separate port; set strategy.processes.port: 0"
            )
        if self.replicas > 1 and self.processes.port:
            raise ValueError(
                f"strategy.processes.port {self.processes.port} does not work with replicas "
                f"{self.replicas}: servers that take over open further ports; set "
                "strategy.processes.port: 0"
            )
        return self

    def outer(self) -> None:
        return None


StrategyConfig = Annotated[
    Synchronous | Lookahead | ParameterServer | Hybrid, Field(discriminator="type")
]
"""The union of strategies, each of which is a `jaxdist.train.strategy.contract.Strategy`."""
