"""The division of an experiment over parameter servers and workers."""

from __future__ import annotations

from jaxdist.data.loader import Loader
from jaxdist.experiment.experiment import Experiment
from jaxdist.param_server.training.state import Sharded
from jaxdist.train.step import Program
from jaxdist.train.strategy.config import ParameterServer
from jaxdist.train.strategy.statistics import with_statistics


def sharded_of(experiment: Experiment) -> Sharded:
    """Return the distribution of an experiment's state over its servers."""
    config = experiment.config
    strategy = config.strategy
    assert isinstance(strategy, ParameterServer), strategy.type
    model = experiment.program.model
    placement = strategy.placed(with_statistics(model.params, model.buffers), config.optim)
    return Sharded(strategy, experiment.program, config.optim, placement, config.seed)


def part_of(experiment: Experiment, sharded: Sharded, slot: int) -> tuple[Loader, Program]:
    """Return a worker's part of each batch, and the program that computes the part's gradients.

    Args:
      experiment: the experiment of the run, with all of its workers.
      sharded: the distribution of the experiment's state over servers.
      slot: the number of the worker's part of each batch.
    """
    train = experiment.config.train
    shares = sharded.cluster.shares(train.batch_size)
    loader = experiment.loader.part(sum(shares[:slot]), shares[slot])
    return loader, sharded.share(loader, train.microbatches_of(shares[slot]))
