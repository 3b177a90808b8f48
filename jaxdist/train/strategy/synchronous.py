"""All processes take every step together."""

from __future__ import annotations

import itertools
from typing import Literal

import jax

from jaxdist.config.schema import Config
from jaxdist.metrics.account import Kind
from jaxdist.optim.build import Optimizer
from jaxdist.train.loop import run_loop
from jaxdist.train.memory import told_if_too_large
from jaxdist.train.replicas.errors import SuspectStateError
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
        return all_steps(job)


def all_steps(job: Job) -> TrainState:
    """Every step of a run; where its state is suspect, again from the newest whole checkpoint.

    Recomputing is enough: what is wrong once on a device is rarely so a second time (arXiv
    2604.00726), and the same steps from the same state have the same bits.

    Raises:
      SuspectStateError: the run may not go back, or not again.
      RunError: what `through_stages` raises.
    """
    for restores in itertools.count():
        with job.prepared() as prepared:
            try:
                return through_stages(prepared)
            except SuspectStateError as error:
                error.check_restores(restores)
                prepared.note(f"going back: {error.what}")
        # The error is gone here, and with its frames the state that is wrong.
    raise AssertionError("unreachable: the count does not end")


def through_stages(prepared: Prepared) -> TrainState:
    """The steps that are left, stage by stage, each from where its batches stand.

    Raises:
      RunError: a step does not fit the memory; whatever the hooks raise.
    """
    state, hooks, account = prepared.state, prepared.hooks, prepared.account
    for stage in prepared.stages:
        start = int(state.step)
        if start >= stage.last_step or hooks.stopped:
            continue
        prepared.enter(stage)
        # A process that has compiled waits in its first step for those that still compile.
        wait = jax.block_until_ready if jax.process_count() > 1 else None
        train = account.first(Kind.COMPILE, stage.program.train, wait)
        with (
            told_if_too_large(f"a step of {stage.batch_size} examples"),
            stage.loader.batches(start - stage.first_step) as batches,
            account.within(Kind.STEP),
        ):
            waited = account.each(Kind.INPUT_WAIT, batches)
            state = run_loop(train, state, waited, hooks, start=start, stop=stage.last_step)
    return state
