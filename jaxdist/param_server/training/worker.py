"""The worker of a run, which reads from all servers, computes, and pushes to all servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.data.loader import Batches, DeviceBatch, Loader
from jaxdist.models.loss import Sums
from jaxdist.param_server.consistency.arrays import elastic_difference
from jaxdist.param_server.consistency.arrival import OnArrival
from jaxdist.param_server.consistency.contract import Consistency
from jaxdist.param_server.consistency.elastic import Elastic
from jaxdist.param_server.live.client import Client
from jaxdist.param_server.live.layout import joined_shards
from jaxdist.param_server.training.state import Sharded
from jaxdist.train.state import TrainState
from jaxdist.train.step import Program
from jaxdist.train.strategy.statistics import divided, pushed_values, with_statistics
from jaxdist.trees import flatten_with_names
from jaxdist.types import JsonObject, PyTree

Flats = list[np.ndarray]
"""The parameters or changes, as one array for each server."""


Measured = Mapping[str, tuple[float, float]]
"""The total and weight of each value that the loss measures, by name."""


class PushComputation(Protocol):
    """A computation of the change that a worker pushes, from the parameters that it has read."""

    def begin(self, flats: Flats) -> Flats | None:
        """Accept new parameters; return the change if it needs no batch, and otherwise None."""
        ...

    def compute(self, batches: Sequence[DeviceBatch], clock: int) -> tuple[Flats, Sums]:
        """Return a worker's change of the parameters, and the sums of the loss's values.

        Args:
          batches: the worker's parts of the batches of a clock.
          clock: the clock of the computation.
        """
        ...


@dataclass
class _OnDevices:
    """The conversion between flat arrays and a program's tree of parameters and statistics.

    Attributes:
      slot: the worker's number among the active workers.
    """

    sharded: Sharded
    program: Program
    slot: int

    def draw(self, step: int) -> np.int32:
        """Return a step number that seeds random layers differently for each step and worker."""
        return np.int32(step * self.sharded.cluster.workers + self.slot)

    def tree(self, flats: Flats) -> PyTree:
        arrays = joined_shards(self.sharded.layouts, flats, self.sharded.shapes)
        wanted = self.program.state_shapes
        shapes = with_statistics(wanted.params, wanted.buffers)
        leaves = [
            jax.device_put(arrays[name], shape.sharding)
            for name, shape in flatten_with_names(shapes)
        ]
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    def flats(self, tree: PyTree) -> Flats:
        arrays = {name: np.asarray(leaf) for name, leaf in flatten_with_names(tree)}
        return [layout.flatten(arrays) for layout in self.sharded.layouts]

    def loaded(self, state: TrainState, flats: Flats) -> TrainState:
        """Return a state with the parameters and the statistics of flat arrays."""
        params, buffers = divided(self.tree(flats), state.buffers)
        return replace(state, params=params, buffers=buffers)

    def flats_of(self, state: TrainState) -> Flats:
        return self.flats(with_statistics(state.params, state.buffers))


@dataclass
class GradientOnly(_OnDevices):
    """A computation that pushes the gradient of one batch."""

    _held: PyTree = None

    def begin(self, flats: Flats) -> None:
        self._held = self.tree(flats)

    def compute(self, batches: Sequence[DeviceBatch], clock: int) -> tuple[Flats, Sums]:
        (batch,) = batches
        shapes = self.program.own_shapes
        params, buffers = divided(self._held, shapes.buffers)
        state = TrainState(self.draw(clock), params, (), buffers, None, shapes.exchange)
        found = self.program.gradients(state, batch)
        return self.flats(pushed_values(found.grads, buffers, found.buffers)), found.sums


@dataclass
class LocalSteps(_OnDevices):
    """A computation that trains with the worker's own optimizer, and pushes the parameters' change.

    Attributes:
      alpha: the rate of elastic averaging, which pushes before the steps, or None to push after the
        steps.
    """

    alpha: float | None = None
    _state: TrainState | None = None
    _begun: Flats | None = None
    _difference: Flats | None = None

    def begin(self, flats: Flats) -> Flats | None:
        known = self._state
        state = self.program.init() if known is None else known
        if known is None or self.alpha is None:
            state = self.loaded(state, flats)
        self._state = state
        if self.alpha is None:
            self._begun = flats
            return None
        own = self.flats_of(state)
        pairs = zip(own, flats, strict=True)
        self._difference = [elastic_difference(x, c, self.alpha) for x, c in pairs]
        return self._difference

    def compute(self, batches: Sequence[DeviceBatch], clock: int) -> tuple[Flats, Sums]:
        state = self._state
        assert state is not None, "nothing was read"
        total: Sums | None = None
        for number, batch in enumerate(batches):
            step = jax.device_put(self.draw(clock * len(batches) + number), self._scalar)
            found = self.program.gradients(replace(state, step=step), batch)
            sums: Sums = found.sums
            # Without tokens the gradient would be 0/0, so the optimizer takes no step.
            if float(sums["loss"].weight):
                state, _ = self.program.update(replace(state, step=step), found)
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
            if number == 0 and self._difference is not None:
                # EASGD computes the gradient at the worker's parameters before the elastic
                # difference is subtracted.
                moved = zip(self.flats_of(state), self._difference, strict=True)
                state = self.loaded(state, [x - own for x, own in moved])
        assert total is not None
        self._state = state
        if self._begun is None:
            return [], total
        pairs = zip(self.flats_of(state), self._begun, strict=True)
        return [after - before for after, before in pairs], total

    @cached_property
    def _scalar(self) -> jax.sharding.Sharding:
        return self.program.state_shapes.step.sharding


def computation(sharded: Sharded, program: Program, slot: int) -> PushComputation:
    """Return the computation of a worker, from parameters to the change that is pushed.

    Args:
      sharded: the distribution of the run's state over servers.
      program: the program that computes the worker's part of a batch.
      slot: the number of the worker's part of each batch.
    """
    cluster = sharded.cluster
    model = cluster.consistency
    if model.payload == "gradient":
        return GradientOnly(sharded, program, slot)
    alpha = model.rate_of(cluster.workers) if isinstance(model, Elastic) else None
    return LocalSteps(sharded, program, slot, alpha)


@dataclass
class Worker:
    """A worker of a run.

    Attributes:
      loader: the loader of the worker's part of each batch.
      slot: the worker's number among the active workers; a replacement keeps the number.
      stop: the first clock that the worker does not compute; the value may be lowered while the
        worker runs.
      measure: the function that is called with a clock and the loss's measured values before the
        gradient is pushed, so that the loss of every applied gradient is known even if the worker
        dies.
      tell: the function that is called with a report when the next computation can begin. The
        seconds of a clock include the seconds of the waits for servers.
    """

    client: Client
    sharded: Sharded
    program: Program
    loader: Loader
    slot: int
    stop: int
    measure: Callable[[int, Measured], None]
    tell: Callable[[JsonObject], None]

    def run(self) -> None:
        """Run until the stop clock, and wait until all pushes are settled.

        Raises:
          RunError: a deadline passed, or a server refused a message.
        """
        client, model = self.client, self.sharded.cluster.consistency
        work = computation(self.sharded, self.program, self.slot)
        with _Ahead(self.loader, self.sharded.cluster.local_steps) as ahead:
            flats = client.read() if self.stop > 0 else []
            while client.clock < self.stop:
                begun, waited = time.perf_counter(), client.waited_seconds
                clock = client.clock
                first = work.begin(flats)
                if first is not None:
                    client.push(first)
                self._hold_back(model)
                changes, sums = work.compute(ahead.take(clock), clock)
                measured = {n: (float(mean.total), float(mean.weight)) for n, mean in sums.items()}
                self.measure(clock, measured)
                if first is None:
                    client.push(changes, tokens=measured["loss"][1])
                if client.clock < self.stop:
                    flats = client.read()
                report: JsonObject = {
                    "clock": clock,
                    "seconds": time.perf_counter() - begun,
                    "waited_seconds": client.waited_seconds - waited,
                    "received_bytes": client.received_bytes,
                    "sent_bytes": client.sent_bytes,
                }
                self.tell(report)
        client.drain()

    def _hold_back(self, model: Consistency) -> None:
        if not isinstance(model, OnArrival) or model.value_bound is None:
            return
        rate = self.sharded.rate_of(self.client.clock)
        workers = self.sharded.cluster.workers
        unit = rate * model.rate(0, workers)

        def small() -> bool:
            found = [self.client.under_way(at) for at in range(len(self.sharded.layouts))]
            sums = (sum(changes[1:], start=changes[0]) for changes in found if changes)
            # NumPy's maximum is NaN if any number is NaN, in any order of the numbers.
            largest = float(np.max([np.abs(one).max(initial=0) for one in sums], initial=0.0))
            return not model.holds_back(unit * largest, workers)

        what = "its changes to be applied (strategy.consistency.value_bound)"
        self.client.wait_until(small, what)


class _Ahead(AbstractContextManager):
    """A loader of batches by clock.

    While clocks are taken in order, the loader loads the batches of the next clocks in advance.
    """

    def __init__(self, loader: Loader, steps: int) -> None:
        self._loader, self._steps = loader, steps
        self._batches: Batches | None = None
        self._next = -1

    def __exit__(self, *exception: object) -> None:
        if self._batches is not None:
            self._batches.close()

    def take(self, clock: int) -> list[DeviceBatch]:
        """Return the batches of a clock of this worker."""
        if self._batches is None or clock != self._next:
            if self._batches is not None:
                self._batches.close()
            self._batches = self._loader.batches(clock * self._steps)
        self._next = clock + 1
        return [next(self._batches) for _ in range(self._steps)]
