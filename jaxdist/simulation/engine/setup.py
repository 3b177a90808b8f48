"""Functions that derive the update rule, the placement and the bound on reads from the settings."""

from __future__ import annotations

import numpy as np

from jaxdist.param_server.cluster import Cluster
from jaxdist.param_server.consistency.arrival import SSP, AdaptiveSSP
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.consistency.decoupled import Decoupled
from jaxdist.param_server.consistency.elastic import Elastic
from jaxdist.param_server.consistency.rounds import BSP
from jaxdist.param_server.contract import Arrays
from jaxdist.param_server.placement.contract import Placement
from jaxdist.param_server.placement.ranges import PlaceableTensor
from jaxdist.simulation.engine.problem import Sgd, UpdateRule


def server_rule(model: Consistency, rule: UpdateRule) -> UpdateRule:
    """Return the rule with which servers update parameters."""
    if isinstance(model, Decoupled):
        return Sgd(model.learning_rate, model.momentum, model.nesterov)
    return rule


def place_arrays(start: Arrays, cluster: Cluster, *, divisible: bool) -> Placement:
    """Return the placement of a problem's arrays on the cluster's servers."""
    tensors = [
        PlaceableTensor(name, len(np.atleast_1d(array)), np.asarray(array).nbytes, divisible)
        for name, array in start.items()
    ]
    return cluster.placement.place(tensors, range(cluster.servers))


def bound_of(model: Consistency) -> int | None:
    """Return the largest age of a read, in clocks, that a consistency model allows, or None."""
    match model:
        case SSP():
            return model.bound
        case AdaptiveSSP():
            return model.most
        case BSP(backups=0) | Elastic(order="rounds"):
            return 0
        case _:
            return None
