"""The training loop, which dispatches a step before it waits for the previous step's metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Protocol

import jax

from jaxdist.models.loss import Batch
from jaxdist.train.state import TrainState

StepFunction = Callable[[TrainState, Batch], tuple[TrainState, jax.Array]]


class Hooks(Protocol):
    """The callbacks that a loop calls between steps."""

    def waiting(self, step: int) -> None:
        """Learn that the loop now waits for `step`; the next call is `metrics` for this step."""

    def metrics(self, step: int, values: jax.Array, step_seconds: float) -> None:
        """Receive the metrics of a complete step; the loop calls this for every step, in order.

        Args:
          step: the number of the step, counted from 1.
          values: the vector of metrics that `Program.train` returns.
          step_seconds: the time of the step, in seconds.
        """

    def due(self, step: int) -> bool:
        """Return whether to call `boundary` after `step`; if true, the loop waits for the step."""
        ...

    def boundary(self, step: int, state: TrainState) -> tuple[TrainState, bool]:
        """Return the state to continue with after `step`, and whether to end the run."""
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
    """Take steps `start + 1` to `stop`; return the state after the last step taken.

    The loop dispatches step n + 1 before it waits for the metrics of step n, so that the work of
    Python overlaps with the work of the devices. But if `hooks.due` is true for step n, the loop
    waits for step n first.

    Args:
      train: the function that takes a step and donates the state.
      batches: the batches of the steps from `start + 1`.
      hooks: the callbacks between steps, one of which may end the run early.
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
            # The time of the hooks at this boundary is not part of the next step's time.
            clock = time.perf_counter()
    settle()
    return state
