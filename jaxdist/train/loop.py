"""The loop: dispatch a step, look at the one before, never wait for the one that runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import jax

from jaxdist.models.loss import Batch
from jaxdist.train.state import TrainState

StepFunction = Callable[[TrainState, Batch], tuple[TrainState, jax.Array]]


class Hooks(Protocol):
    """What happens beside the steps."""

    def waiting(self, step: int) -> None:
        """The loop begins to wait for `step`, whose metrics come next."""

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        """The metrics of `step`, ready to be read; called for every step, in order."""

    def due(self, step: int) -> bool:
        """Whether `boundary` must be called after `step` (which waits for it to finish)."""
        ...

    def boundary(self, step: int, state: TrainState) -> tuple[TrainState, bool]:
        """After `step`, with its metrics seen: the state to go on with, and whether to end."""
        ...


def run_loop(
    train: StepFunction,
    state: TrainState,
    batches: Iterator[Batch],
    hooks: Hooks,
    *,
    start: int,
    stop: int,
) -> TrainState:
    """Steps `start + 1` to `stop`; returns the state after the last one taken.

    One step is always in flight: the metrics of step n are awaited only after step n + 1 has been
    dispatched, so that Python's work hides behind the device's.
    """
    pending: tuple[int, jax.Array] | None = None
    clock = time.perf_counter()

    def settle() -> None:
        nonlocal pending, clock
        if pending is None:
            return
        step, values = pending
        hooks.waiting(step)
        values.block_until_ready()
        now = time.perf_counter()
        hooks.metrics(step, values, now - clock)
        pending, clock = None, now

    for step in range(start + 1, stop + 1):
        state, values = train(state, next(batches))
        settle()
        pending = (step, values)
        if hooks.due(step):
            settle()
            state, stop_here = hooks.boundary(step, state)
            if stop_here:
                break
            clock = time.perf_counter()
    settle()
    return state
