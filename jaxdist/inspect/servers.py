"""An inspection of parameter servers: a worker's program, and each server's state and traffic."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax

from jaxdist.experiment import Experiment
from jaxdist.parallel.jitted import Compiled
from jaxdist.param_server.processes.parts import part_of, sharded_of
from jaxdist.param_server.training.state import Sharded
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.train.strategy.config import ParameterServer
from jaxdist.types import JsonObject


@dataclass(frozen=True)
class ServerCost:
    """A server's state and traffic.

    Attributes:
      received_bytes, sent_bytes: bytes in a clock of all its clients: a push of each, and the
        parameters to each.
    """

    number: int
    parameter_bytes: int
    optimizer_bytes: int
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class WorkerPart:
    """The program that is compiled in place of the whole step, where servers hold the parameters.

    Attributes:
      share: the largest share of the batch.
      state: shapes of the program's state; with the optimizer's only where workers have it.
    """

    program: Program
    share: float
    compiled: Compiled
    state: TrainState
    servers: tuple[ServerCost, ...]


def worker_part(experiment: Experiment) -> WorkerPart | None:
    """Return the worker with the largest share, and all servers; None without servers."""
    if not isinstance(experiment.config.strategy, ParameterServer):
        return None
    sharded = sharded_of(experiment)
    size = experiment.config.train.batch_size
    shares = sharded.cluster.shares(size)
    _, program = part_of(experiment, sharded, shares.index(max(shares)))
    servers = tuple(_server(sharded, at) for at in range(len(sharded.layouts)))
    state, compiled = program.state_shapes, program.train
    if sharded.keeps_moments:
        state, compiled = replace(state, opt_state=(), loss_scale=None), program.gradients
    return WorkerPart(program, max(shares) / size, compiled, state, servers)


def _server(sharded: Sharded, at: int) -> ServerCost:
    layout, clients = sharded.layouts[at], sharded.cluster.clients
    size = layout.spec.size_bytes
    leaves = jax.tree.leaves(sharded.begun(layout))
    optimizer = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    push = sharded.pushes[at].size_bytes
    return ServerCost(layout.server, size, optimizer, clients * push, clients * size)


def servers_json(part: WorkerPart) -> list[JsonObject]:
    """Convert to plain data."""
    return [dict(vars(one)) for one in part.servers]
