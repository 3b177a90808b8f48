"""The simulation of a config's model, data and optimizer with a parameter server."""

from __future__ import annotations

import json

from jaxdist.errors import ConfigError
from jaxdist.experiment import Experiment, ExperimentConfig
from jaxdist.param_server.contract import vectors
from jaxdist.param_server.training.checks import peak
from jaxdist.simulation.engine.report import Report
from jaxdist.simulation.engine.run import simulate_training
from jaxdist.simulation.rule import ServerRule
from jaxdist.simulation.workers import ModelProblem
from jaxdist.tables.batch import RowsLoader
from jaxdist.train.strategy.config import ParameterServer

POINTS = 20
"""The number of points of a loss curve if `eval.every` is not set."""
_NOT_IN_GRADIENTS = {"strategy", "optim", "run", "checkpoint"}
"""The sections of a config that do not affect gradients if the shares of the workers are given."""


def cluster_of(config: ExperimentConfig) -> ParameterServer:
    """Return a config's strategy, which must be a parameter server.

    Raises:
      ConfigError: the strategy is not a parameter server.
    """
    if not isinstance(config.strategy, ParameterServer):
        raise ConfigError(
            f"strategy.type {config.strategy.type}: the command simulates only parameter servers; "
            "add, for example, 'strategy={type: parameter_server, workers: 8}'"
        )
    return config.strategy


class Simulator:
    """A simulator that reuses compiled programs if the model, the data and the shares are equal."""

    def __init__(self) -> None:
        self._problems: dict[str, ModelProblem] = {}

    def __call__(self, experiment: Experiment) -> Report:
        """Simulate all steps of an experiment in virtual time, and return the report.

        Raises:
          JaxdistError: any error that the user can correct.
        """
        config, steps = experiment.config, experiment.total_steps
        cluster, optimizer = cluster_of(config), experiment.program.optimizer
        rule = ServerRule(
            config.optim,
            optimizer.schedule,
            experiment.program.model.params,
            experiment.program.dims,
            learning_rate=peak(optimizer, steps),
            updates_per_step=cluster.updates_per_step,
        )
        return simulate_training(
            cluster,
            self._problem(experiment, cluster),
            rule,
            clocks=cluster.clocks(steps),
            measure_every=config.eval.every or max(1, steps // POINTS),
            pooled=cluster.pooled,
            whole=vectors(experiment.program.dims),
            step_seconds=cluster.step_seconds(config.train.batch_size),
        )

    def _problem(self, experiment: Experiment, cluster: ParameterServer) -> ModelProblem:
        config, train = experiment.config, experiment.config.train
        shares = cluster.shares(train.batch_size)
        same = config.model_dump(mode="json", exclude=_NOT_IN_GRADIENTS)
        key = json.dumps([same, shares])
        assert not isinstance(experiment.heldout, RowsLoader), "only hybrid has tables on servers"
        if key not in self._problems:
            self._problems = {  # Only the newest problem is kept, to save memory.
                key: ModelProblem(
                    experiment.program,
                    experiment.loader,
                    shares,
                    [train.microbatches_of(share) for share in shares],
                    experiment.heldout,
                    evaluation_batches=config.eval.batches,
                )
            }
        return self._problems[key]
