"""What an inspection says of parameter servers: one worker's program, and what each server has."""

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
class Server:
    """One server.

    Attributes:
      received_bytes, sent_bytes: in a clock of all its clients: a push of each, and the parameters
        to each.
    """

    number: int
    parameter_bytes: int
    optimizer_bytes: int
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class WorkerPart:
    """What is compiled in place of the whole step, where servers have the parameters.

    Attributes:
      share: of the batch: the largest one.
      state: shapes of what the program is given; the optimizer's only where workers have one.
    """

    program: Program
    share: float
    compiled: Compiled
    state: TrainState
    servers: tuple[Server, ...]


def worker_part(experiment: Experiment) -> WorkerPart | None:
    """The largest part of the batch, and all servers; None where there are none."""
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


def _server(sharded: Sharded, at: int) -> Server:
    layout, clients = sharded.layouts[at], sharded.cluster.clients
    size = layout.spec.size_bytes
    leaves = jax.tree.leaves(sharded.begun(layout))
    optimizer = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    push = sharded.pushes[at].size_bytes
    return Server(layout.server, size, optimizer, clients * push, clients * size)


def servers_json(part: WorkerPart) -> list[JsonObject]:
    """Plain data."""
    return [dict(vars(one)) for one in part.servers]
