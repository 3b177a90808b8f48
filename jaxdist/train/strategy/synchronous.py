"""All processes take every step together."""

from __future__ import annotations

from typing import Literal

from jaxdist.config.schema import Config
from jaxdist.optim.build import Optimizer
from jaxdist.train.loop import run_loop
from jaxdist.train.memory import told_if_too_large
from jaxdist.train.state import Outer, TrainState
from jaxdist.train.strategy.contract import Job, Prepared, RunSettings


class Synchronous(Config):
    """All processes take every step together, and nothing but steps changes parameters."""

    type: Literal["synchronous"] = "synchronous"
    """Selects this strategy."""

    def outer(self, optimizer: Optimizer) -> Outer | None:
        return None

    def check(self, given: RunSettings) -> tuple[str, ...]:
        return ()

    def run(self, job: Job) -> TrainState:
        with job.prepared() as prepared:
            return through_stages(prepared)


def through_stages(prepared: Prepared) -> TrainState:
    """The steps that are left, stage by stage, each from where its batches stand.

    Raises:
      RunError: a step does not fit the memory; whatever the hooks raise.
    """
    state, hooks = prepared.state, prepared.hooks
    for stage in prepared.stages:
        start = int(state.step)
        if start >= stage.last_step or hooks.stopped:
            continue
        prepared.enter(stage)
        batches = stage.loader.batches(start - stage.first_step)
        with told_if_too_large(f"a step of {stage.batch_size} examples"), batches:
            state = run_loop(
                stage.program.train, state, batches, hooks, start=start, stop=stage.last_step
            )
    return state
