"""The parameter servers in an inspection: the program of a worker, and each server's traffic."""

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


@dataclass(frozen=True)
class ServerCost:
    """The state and traffic of a parameter server.

    Attributes:
      number: the server's number.
      parameter_bytes: the bytes of the server's parameters.
      optimizer_bytes: the bytes of the optimizer's state on the server.
      received_bytes: the bytes that the server receives if each client pushes once.
      sent_bytes: the bytes that the server sends if each client pulls the parameters once.
    """

    number: int
    parameter_bytes: int
    optimizer_bytes: int
    received_bytes: int
    sent_bytes: int


@dataclass(frozen=True)
class WorkerPart:
    """The part of a step that a worker computes with parameter servers, as a compiled program.

    Attributes:
      program: the worker's program.
      share: the worker's fraction of the batch; no other worker has a larger fraction.
      compiled: the function of the worker's step.
      state: the shapes of the program's state, without optimizer state that servers keep.
      servers: the state and traffic of each server.
    """

    program: Program
    share: float
    compiled: Compiled
    state: TrainState
    servers: tuple[ServerCost, ...]


def worker_part(experiment: Experiment) -> WorkerPart | None:
    """Return a worker's part of a step, for the worker with the largest share of the batch.

    The result is None if the experiment has no parameter servers.
    """
    if not isinstance(experiment.config.strategy, ParameterServer):
        return None
    sharded = sharded_of(experiment)
    size = experiment.config.train.batch_size
    shares = sharded.cluster.shares(size)
    _, program = part_of(experiment, sharded, shares.index(max(shares)))
    servers = tuple(_server(sharded, at) for at in range(len(sharded.layouts)))
    state, compiled = program.state_shapes, program.train
    # Servers that keep the optimizer's state update the parameters, and workers compute only
    # gradients.
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
